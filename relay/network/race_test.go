package network

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Race tries addresses in order, after a delay or after the failure of the previous address; the
// first that leads there wins, and nothing is left of the others.
func TestRaceFirstConnectionWins(t *testing.T) {
	const delay, never = 250 * time.Millisecond, time.Hour
	at := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	wrong, answered := errors.New("wrong"), errors.New("answered")
	type way struct {
		after time.Duration
		err   error
	}
	for name, c := range map[string]struct {
		ways   []way
		limit  time.Duration // of the whole; 0 for none
		winner int
		took   time.Duration
		begun  []time.Duration
		failed []error
	}{
		"the first answers": {[]way{{at(100), nil}, {0, nil}}, 0, 0, at(100), []time.Duration{0},
			[]error{nil}},
		"it is silent": {[]way{{never, nil}, {at(10), nil}}, 0, 1, at(260),
			[]time.Duration{0, at(250)}, []error{nil, nil}},
		"all but the last are": {[]way{{never, nil}, {never, nil}, {never, nil}, {at(10), nil}}, 0, 3,
			at(760), []time.Duration{0, at(250), at(500), at(750)}, make([]error, 4)},
		"it fails at once": {[]way{{at(1), wrong}, {at(10), nil}}, 0, 1, at(11),
			[]time.Duration{0, at(1)}, []error{wrong, nil}},
		"a failure begins the delay anew": {[]way{{at(200), wrong}, {never, nil}, {at(10), nil}}, 0, 2, at(460),
			[]time.Duration{0, at(200), at(450)}, []error{wrong, nil, nil}},
		"it is slow, and first all the same": {[]way{{at(300), nil}, {at(100), nil}}, 0, 0, at(300),
			[]time.Duration{0, at(250)}, []error{nil, nil}},
		"what fails does not end the others": {[]way{{at(900), nil}, {at(1), wrong}, {at(1), wrong}}, 0, 0, at(900),
			[]time.Duration{0, at(250), at(251)}, []error{nil, wrong, wrong}},
		"all fail": {[]way{{at(300), wrong}, {at(100), wrong}}, 0, -1, at(350),
			[]time.Duration{0, at(250)}, []error{wrong, wrong}},
		"an answer leaves no others to be begun": {[]way{{at(1), answered}, {0, nil}}, 0, -1, at(1), []time.Duration{0},
			[]error{answered}},
		"but those that are under way may go on": {[]way{{at(300), nil}, {at(1), answered}, {0, nil}}, 0, 0, at(300),
			[]time.Duration{0, at(250)}, []error{nil, answered}},
		"its time is over": {[]way{{never, nil}, {never, nil}, {0, nil}}, at(400), -1, at(400),
			[]time.Duration{0, at(250)}, []error{nil, nil}},
		"what ends by the end of all is no failure": {[]way{{at(1), wrong}, {never, nil}}, at(400), -1, at(400),
			[]time.Duration{0, at(1)}, []error{wrong, nil}},
		"there is none": {nil, 0, -1, 0, nil, nil},
		"two at once: one is kept, one taken back": {[]way{{at(250), nil}, {0, nil}}, 0, -2, at(250), nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.limit > 0 {
					var cancel func()
					ctx, cancel = context.WithTimeout(ctx, c.limit)
					defer cancel()
				}
				start := time.Now()
				var mu sync.Mutex
				var begun []time.Duration
				var made, dropped []int
				f := Race[int]{
					Ways: len(c.ways), Delay: delay,
					Try: func(ctx context.Context, way int) (int, error) {
						mu.Lock()
						begun = append(begun, time.Since(start))
						mu.Unlock()
						select {
						case <-time.After(c.ways[way].after):
							if c.ways[way].err == nil {
								mu.Lock()
								made = append(made, way)
								mu.Unlock()
							}
							return way, c.ways[way].err
						case <-ctx.Done():
							return 0, ctx.Err()
						}
					},
					Settles: func(err error) bool { return err == answered },
					Drop:    func(way int) { dropped = append(dropped, way) },
				}.Run(ctx)
				if took := time.Since(start); took != c.took {
					t.Errorf("it took %v, not %v", took, c.took)
				}
				if c.winner == -2 { // either
					if f.Winner < 0 || f.Won != f.Winner || len(made) != 1+len(dropped) {
						t.Errorf("%+v; of %v %v are taken back", f, made, dropped)
					}
					return
				}
				if f.Winner != c.winner || f.Winner >= 0 && f.Won != f.Winner || f.Begun != len(c.begun) ||
					!slices.Equal(begun, c.begun) ||
					!slices.Equal(f.Errors[:f.Begun], c.failed) {
					t.Errorf("%+v, begun at %v", f, begun)
				}
				if len(made)-len(dropped) != min(1, f.Winner+1) {
					t.Errorf("of %v %v are taken back", made, dropped)
				}
			})
		})
	}
}

// An address that has accepted a connection gets more time, in every race of the context: a slow
// relay gets a connection per host, and not a connection per address.
func TestRaceAnsweredAddressGetsMoreTime(t *testing.T) {
	at := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	wrong := errors.New("wrong")
	type way struct {
		meets []time.Duration // somebody, so long after its beginning
		after time.Duration   // the last meeting
		err   error
	}
	silent := way{nil, time.Hour, nil}
	for name, c := range map[string]struct {
		ways   []way
		winner int
		begun  []time.Duration
	}{
		"it is slow": {[]way{{[]time.Duration{at(5)}, at(1490), nil}, silent}, 0, []time.Duration{0}},
		"it says nothing": {[]way{{[]time.Duration{at(5)}, time.Hour, nil}, {nil, at(10), nil}}, 1,
			[]time.Duration{0, at(1505)}},
		"it is behind the second way": {[]way{silent, {[]time.Duration{at(5)}, at(600), nil}, silent}, 1,
			[]time.Duration{0, at(250)}},
		"it closes": {[]way{{[]time.Duration{at(5), at(205)}, at(100), wrong}, {nil, at(10), nil}}, 1,
			[]time.Duration{0, at(305)}},
		"it closes, and is met again": {[]way{{[]time.Duration{at(5), at(1205)}, at(1000), nil}, silent}, 0,
			[]time.Duration{0}},
		"it is met late, beside another": {[]way{{[]time.Duration{at(300)}, at(1000), nil}, silent, silent}, 0,
			[]time.Duration{0, at(250)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				var mu sync.Mutex
				var begun []time.Duration
				inner := Race[int]{
					Ways: len(c.ways), Delay: AttemptDelay, Answer: AnswerDelay,
					Try: func(ctx context.Context, way int) (int, error) {
						now := time.Now()
						mu.Lock()
						begun = append(begun, now.Sub(start))
						mu.Unlock()
						for _, at := range c.ways[way].meets {
							time.Sleep(time.Until(now.Add(at)))
							reportMet(ctx)
						}
						select {
						case <-time.After(c.ways[way].after):
							return way, c.ways[way].err
						case <-ctx.Done():
							return 0, ctx.Err()
						}
					},
					Drop: func(int) {},
				}
				var f Finish[int]
				outer := 0 // ways of it; of two the second fails at once
				Race[int]{
					Ways:   2,
					Delay:  AttemptDelay + time.Millisecond,
					Answer: AnswerDelay + time.Hour,
					Try: func(ctx context.Context, way int) (int, error) {
						if outer++; way > 0 {
							return 0, wrong
						}
						f = inner.Run(ctx)
						return 0, nil
					},
					Drop: func(int) {},
				}.Run(
					t.Context(),
				)
				if f.Winner != c.winner || !slices.Equal(begun, c.begun) {
					t.Errorf("%+v, begun at %v", f, begun)
				}
				want := 1
				if first := c.ways[0].meets; len(first) == 0 || first[0] > AttemptDelay { // when nobody is met yet
					want = 2
				}
				if outer != want {
					t.Errorf("in the race around it %d ways were begun", outer)
				}
			})
		})
	}
}
