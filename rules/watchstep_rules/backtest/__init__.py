"""Rules over recorded runs: what was judged live is judged again, and other rules and values are tried."""
