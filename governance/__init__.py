"""Evidence: ledger, catalogs of controls, risk, fairness, exports. Knows nothing of the platform or of torch."""
