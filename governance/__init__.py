"""Evidence: the ledger, the catalogs of controls, risk, fairness and exports. Knows nothing of the platform or of torch."""
