"""Maps that are trained rather than solved for: networks beside a closed-form base, and the loop that trains them."""
