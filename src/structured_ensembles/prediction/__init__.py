"""Parts of an ensemble's predictions: combination rules, conformal sets, calibration, input checks."""
