// Package programs finds the executables of hook and relay, and checks that the kernel can execute
// the programs.
package programs
