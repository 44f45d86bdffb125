// Package engines has the container engines that Peerlane works with: which
// versions, how they are had on a Debian 12 machine, and where they lie. Its
// tests, with the build tag engines, run every case of integration/matrix.txt in
// every one of them; `make test-engines` runs both.
//
// Some engines are packages of this Debian, some are packages of the next one, in
// a root file system of its own, and some are built from their modules: modules
// has one Go module for each, whose go.sum pins what it is built from. They are
// kept apart from Peerlane's own module, which would otherwise require hundreds
// of modules that none of its programs is linked with. The clients of containerd
// and of the CRI are in containerd's module, to be linked with the version that
// they talk to.
package engines
