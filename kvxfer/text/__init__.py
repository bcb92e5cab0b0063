"""Where documents come from: one module per kind of corpus, each an iterator of texts in a fixed order."""
