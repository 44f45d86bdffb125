// Package packages tries what `make packages` made, as it is installed, in root file
// systems of their own (packaging/trees): its tests have the build tag packages, and
// run as root in a mount namespace that ends with them, by `make test-packages`.
package packages
