// Package engines installs the container engines that Peerlane works with on a Debian 12 machine:
// versions, sources and places. Its tests, with the build tag engines, run every case of
// integration/matrix.txt in every engine; `make test-engines` runs both.
//
// Some engines are packages of this Debian, some are packages of the next Debian in a separate root
// file system, and some are built from Go modules: the folder modules has one module for each,
// whose go.sum pins the sources. They are separate from Peerlane's module, which would otherwise
// require hundreds of modules that no program of Peerlane links. The clients of containerd and of
// the CRI are in containerd's module, so that they link the version of the daemon.
package engines
