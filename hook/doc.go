// Package hook starts the relay of a container at createRuntime, or prestart, and mounts the
// relay's socket into the container.
//
// [Create] is the hook of a CDI device, [CreateAnnotated] that of an annotation. [Launch]
// makes a generation (package generation) with its sockets, and starts a supervisor (package
// supervisor): by a fork, or by systemd. [Attach] mounts the socket directory over the anchor.
// At poststop the hook calls package collector.
package hook
