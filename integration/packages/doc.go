// Package packages tests the packages of `make packages` after installation, in separate root file
// systems (packaging/trees). The tests have the build tag packages, and run as root in a private
// mount namespace, by `make test-packages`.
package packages
