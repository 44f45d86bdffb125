// Package hook starts the relay of a container at createRuntime, or prestart, and mounts the
// relay's socket into the container.
//
// [Create] handles the hook of a CDI device, and [CreateAnnotated] that of an annotation. [Launch]
// makes a generation (package generation) with its sockets, and starts a supervisor (package
// supervisor) by fork or through systemd. [Attach] mounts the socket directory over the anchor. At
// poststop the hook calls package collector.
package hook
