// Package hook is what happens to a container at its start and at its end: its
// relay is started and its socket mounted, and afterwards nothing is left.
//
// At createRuntime, [Launch] makes a generation: a name of 128 random bits for
// this one life of this one container, with a directory of state, a listening
// socket for the container's processes, one for other relays, and a
// supervisor. [Attach] mounts the socket into the container. The supervisor
// ([Supervise]) starts peerlane-relay with the sockets, starts it again when it
// dies, and when the container's init has ended ends the relay and removes the
// generation. Whatever a killed supervisor leaves, [Collect] removes.
//
// A container is known by its init process, number and start time and the
// kernel's boot, and watched through a pidfd. Its id is for messages only: ids
// are used again, and a runtime may report the end of one container after the
// next of the same id has begun.
//
//	STATE/lock                     held while a generation is found or made
//	STATE/generations/GEN/         locked while it is made, changed or removed
//	    generation.json            Generation: whose it is, what its relay is told
//	    status.json                Status: what its supervisor sees
//	    supervisor                 locked as long as the supervisor lives
//	    init-PID-START             empty: whose it is, for who only looks for that
//	    admin.sock                 where the supervisor is asked and told things
//	    relay.log, relay.log.1     of supervisor and relay, and what was there before
//	STATE/drained.json             Drained: no relay of this host shall run
//	RUN/sockets/GEN/relay.sock     the directory that the container sees
//	RUN/peers/GEN.sock             for the other relays of the host
//
// All locks are flocks on descriptors that no other program inherits, so they
// end with the process that holds them, whatever its end.
package hook
