// Package inject applies CDI devices to the config.json of an OCI bundle, for engines without CDI:
// `peerlane-runtime` calls Bundle between the engine and the runtime.
//
// The origin of a request matters. The administrator's devices are on the runtime's command line
// and always apply. Requests in the environment or annotations of a container can come from an
// image: they apply only if the administrator's list permits the device; otherwise Bundle refuses
// the container.
//
// [Bundle] reads the requests and replaces the file; apply changes only the text. Fields that CDI
// does not touch stay unchanged, even if this program does not know them.
package inject
