// Package inject applies CDI devices to the config.json of an OCI bundle, for
// engines that cannot do it themselves: `peerlane-runtime` calls it between the
// engine and the runtime.
//
// Who asks matters. What the administrator put on the runtime's command line is
// done. What the container's environment or annotations say can come from an
// image, so it is done as far as the administrator's list goes, and refused with
// a sentence beyond it.
//
// [Bundle] does all of it, apply only the change of the text: of that,
// everything stays as it was which CDI does not touch, fields that this program
// has never heard of included.
package inject
