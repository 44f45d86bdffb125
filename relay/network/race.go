package network

import (
	"context"
	"time"
)

// AttemptDelay is how long a way is tried alone, before the next one is tried beside it: the
// Connection Attempt Delay that RFC 8305 (section 5) recommends. net.Dialer does the like
// for the two families of one name alone, and is over with the connection, before anybody
// has proven anything.
const AttemptDelay = 250 * time.Millisecond

// AnswerDelay is how long a way that leads to somebody is tried alone, before the next one is
// tried beside it: a relay that is slow, since many come to it at once, is not to have each of
// them come by all ways. Two others fit into HandshakeTime then.
const AnswerDelay = 1500 * time.Millisecond

// Race is several ways to one thing, of which the earlier are the better. All ways may be
// tried at a time.
type Race[T any] struct {
	Ways int
	// Delay is how long the last way that was begun is waited for before the next one is
	// begun; one that fails is not waited for. Of a way that has met somebody it is Answer.
	Delay, Answer time.Duration
	// Try goes a way, and ends soon when its context does.
	Try func(ctx context.Context, way int) (T, error)
	// Settles says that no other way leads to anything else than this error: none is begun
	// any more. Nil stands for one that never does.
	Settles func(error) bool
	// Drop takes back what a way has led to when another one has won.
	Drop func(T)
}

// Finish is how a race ended.
type Finish[T any] struct {
	// Won is what the way Winner has led to; -1 where none has.
	Won    T
	Winner int
	// Begun are so many of the first ways, and Errors why each of these failed by itself: nil of
	// the winner, and of those that were under way when the race ended.
	Begun  int
	Errors []error
}

// meeting is the context key of the function that reportMet calls.
type meeting struct{}

// reportMet tells the races that a context is of, one within the other, that their way leads to
// somebody, who is waited for.
func reportMet(ctx context.Context) {
	if met, of := ctx.Value(meeting{}).(func()); of {
		met()
	}
}

// Run gives the first that a way leads to. When it returns nothing is tried any more.
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
