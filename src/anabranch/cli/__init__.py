"""The command `anabranch`.  Sits on top of `runtime`; nobody imports it."""
