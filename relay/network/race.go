package network

import (
	"context"
	"time"
)

// AttemptDelay is the head start of an address before the next address: the Connection Attempt
// Delay that RFC 8305 (section 5) recommends. net.Dialer does the like for the two families of one
// name alone, and is over with the connection, before anybody has proven anything.
const AttemptDelay = 250 * time.Millisecond

// AnswerDelay is the head start of an address that has accepted a connection: a relay under many
// simultaneous connects should not get a connect per address from every host. Two others fit into
// HandshakeTime then.
const AnswerDelay = 1500 * time.Millisecond

// Race tries several addresses of a target, of which earlier addresses are better. All ways may be
// tried at a time.
type Race[T any] struct {
	Ways int
	// Delay is the time between the starts of two addresses; one that fails is not waited for.
	// Answer replaces Delay after an accepted connection.
	Delay, Answer time.Duration
	// Try connects to an address, and ends soon after its context.
	Try func(ctx context.Context, way int) (T, error)
	// Settles reports an error that further addresses would not change: none is begun any more. Nil
	// stands for one that never does.
	Settles func(error) bool
	// Drop releases the result of an address after another address has won.
	Drop func(T)
}

// Finish is how a race ended.
type Finish[T any] struct {
	// Won is the result of the address Winner; -1 where none has.
	Won    T
	Winner int
	// Begun is the number of tried addresses, and Errors their independent errors: nil of the
	// winner, and of those that were under way when the race ended.
	Begun  int
	Errors []error
}

// meeting is the context key of the function that reportMet calls.
type meeting struct{}

// reportMet reports to the nested races of a context that the address has accepted a connection.
func reportMet(ctx context.Context) {
	if met, of := ctx.Value(meeting{}).(func()); of {
		met()
	}
}

// Run gives the first that a way leads to. At the return no try is running.
func (r Race[T]) Run(ctx context.Context) Finish[T] {
	type arrival struct {
		way int
		it  T
		err error
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	arrivals, met := make(chan arrival), make(chan struct{})
	trying := context.WithValue(running, meeting{}, func() {
		reportMet(ctx)
		select {
		case met <- struct{}{}:
		case <-running.Done():
		}
	})
	f := Finish[T]{Winner: -1, Errors: make([]error, r.Ways)}
	under, settled := 0, false
	delay := time.NewTimer(r.Delay)
	defer delay.Stop()
	begin := func() {
		if settled || f.Begun == r.Ways || f.Winner >= 0 || ctx.Err() != nil {
			return
		}
		way := f.Begun
		f.Begun++
		under++
		go func() {
			it, err := r.Try(trying, way)
			arrivals <- arrival{way, it, err}
		}()
		delay.Reset(r.Delay)
	}
	begin()
	for under > 0 {
		select {
		case <-delay.C:
			begin()
		case <-met:
			delay.Reset(r.Answer)
		case a := <-arrivals:
			under--
			switch {
			case a.err == nil && f.Winner < 0:
				f.Won, f.Winner = a.it, a.way
				stop()
			case a.err == nil:
				r.Drop(a.it)
			case running.Err() == nil:
				f.Errors[a.way] = a.err
				settled = settled || r.Settles != nil && r.Settles(a.err)
				begin()
			}
		}
	}
	return f
}
