// Package generation reads and writes the state of relays on a host. A generation is a life
// of a container, named by 128 random bits. The hook, supervisors, the collector and
// commands share this state:
//
//	STATE/generations/             locked while a generation is found or made
//	STATE/generations/GEN/         locked while it is made, changed or removed
//	    generation.json            Generation: the container, and the relay's configuration
//	    status.json                Status: the supervisor's last report
//	    supervisor                 locked while the supervisor lives
//	    init-PID-START             empty: finds the generation of an init without reading
//	    admin.sock                 requests to the supervisor
//	    relay.log, relay.log.1     log of supervisor and relay, and the log before the last limit
//	STATE/uids/UID                 second name of the file supervisor: the uid is in use
//	STATE/drained.json             Drained: no relay of this host runs
//	RUN/sockets/GEN/relay.sock     in the directory that the container sees
//	RUN/peers/GEN.sock             for the other relays of the host
//
// A container is identified by its init process: process id, start time and the kernel's boot. The
// container's id is for messages only, because runtimes reuse ids.
//
// Every lock is an flock on a descriptor that no other program inherits, so a lock ends with the
// process that holds the lock.
package generation
