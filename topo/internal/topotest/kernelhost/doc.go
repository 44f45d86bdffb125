// Package kernelhost reads a host for tests from a tree of sysfs.
package kernelhost
