"""Files for auditors: the evidence bundle with its stand-alone verifier, and the workbooks."""
