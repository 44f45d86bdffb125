// Package textfile has the bounds and errors that readers of topology files share.
package textfile
