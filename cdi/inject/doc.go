// Package inject applies CDI devices to the config.json of an OCI bundle, for engines without
// CDI: `peerlane-runtime` calls it between the engine and the runtime.
//
// The origin of a request matters. The administrator's devices are on the runtime's command line,
// and always apply. Requests in the environment or annotations of a container can come from an
// image: they apply only if the administrator's list permits the device, and are refused
// otherwise.
//
// [Bundle] reads requests and replaces the file; apply only changes the text. Fields that CDI
// does not touch stay unchanged, also fields that this program does not know.
package inject
