"""Attribution of tensors to modules, parameters, lines and scopes."""
