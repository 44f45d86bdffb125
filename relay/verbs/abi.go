package verbs

import _ "embed"

// Header is abi.h: the declarations that the software device's C source has in common with this
// package.
//
//go:embed abi.h
var Header string
