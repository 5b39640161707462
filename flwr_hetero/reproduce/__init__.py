"""The experiments of the five papers, one function each, beside what the papers print."""
