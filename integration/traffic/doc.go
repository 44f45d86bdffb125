// Package traffic makes clients of relays exchange random verified messages while other clients
// come, go and are killed. `make soak-relay` runs it for an hour, and integration/gpus/transfers on
// real GPUs.
//
//	fleet, err := traffic.NewFleet(ctx, host, traffic.Options{…})
//	slot := fleet.NewSlot(random, fleet.AnyPair, traffic.Life{…})
//	slot.Live(over)   // two clients attach, connect, exchange, and leave
//	fleet.KillClient(random.IntN) // and similar faults, concurrently
//	err = fleet.Close()
//	report := fleet.Report()
//
// Package kernels fills and compares messages on the GPU. The comparison covers every byte of a
// message and the neighbouring bytes; sizes and offsets need no alignment.
//
// An error of a client is explained if a process that the client depends on died between the
// client's attach and the error, and the status is one for such a death. Any other error is a
// problem, and so is an operation of more than a minute or two: then the client prints its
// goroutines.
package traffic
