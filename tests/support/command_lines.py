"""Words of command lines that several tests give."""

QUICK = ["--model", "mlp", "--epochs", "2", "--members", "2", "--quiet", "true"]
