// Package traffic has clients of relays send each other random messages that are
// verified, while others come, go and are killed: what `make soak-relay` runs for an
// hour, and integration/gpus/transfers on real GPUs.
//
//	fleet, err := traffic.NewFleet(ctx, host, traffic.Options{…})
//	slot := fleet.NewSlot(random, fleet.AnyPair, traffic.Life{…})
//	slot.Live(over)   // two clients attach, connect, exchange, and leave
//	fleet.KillClient(random.IntN) // and its like, beside that
//	err = fleet.Close()
//	report := fleet.Report()
//
// Contents are made and compared on the GPU, by package kernels. Each byte of a message
// and those around it are looked at, sizes and offsets are any number of bytes.
//
// An error that a client meets is explained where something died that it depends on,
// between its attach and the error, and its status is one of those that say so. Every
// other error is a problem, and so is what takes longer than a minute or two: then the
// client says where its goroutines are.
package traffic
