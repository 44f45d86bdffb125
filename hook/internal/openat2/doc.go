// Package openat2 opens paths below a root directory of another process.
package openat2
