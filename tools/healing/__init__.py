"""How the source of pair=smollm2_healed came about: pruned from its target, and healed by distillation."""
