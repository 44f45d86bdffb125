// Package textfile has the limits and errors that readers of topology files share.
package textfile
