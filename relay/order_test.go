package relay_test

import (
	"testing"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
)

// A short message arrives with the announcement, and so before the bytes of an earlier long
// message. The receive of the long message ends first nevertheless: a program may use a single
// timeline for its receives.
func TestReceivesEndInOrderOfTheirMessages(t *testing.T) {
	const long, short, rounds = 12 << 20, 8, 4
	p := hostsByRDMA(t, 1, 4)
	timeline, err := p.b.Timeline(0)
	if err != nil {
		t.Fatal(err)
	}
	for round := range uint64(rounds) {
		want := random(t, long+short)
		p.source.write(0, want)
		p.target.write(0, make([]byte, long+short))
		var ops []*client.Operation
		post := func(op *client.Operation, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			ops = append(ops, op)
		}
		value := 4*round + 1
		post(p.receiving.Receive(p.target.Memory, 0, long, client.Signal(timeline, value)))
		post(p.receiving.Receive(p.target.Memory, long, short, client.Signal(timeline, value+1)))
		post(p.receiving.Receive(p.target.Memory, 0, 0, client.Signal(timeline, value+2)))
		post(p.receiving.Receive(p.target.Memory, long, 1, client.Signal(timeline, value+3)))
		post(p.sending.Send(p.source.Memory, 0, long))
		post(p.sending.Send(p.source.Memory, long, short))
		post(p.sending.Send(p.source.Memory, 0, 0))
		post(p.sending.Send(p.source.Memory, 0, 2)) // longer than its receive
		testutil.Until(t, "the first receive to end", func() bool { return timeline.Reached(value) })
		if got := p.target.read(long-1, 1); got[0] != want[long-1] {
			t.Fatalf("round %d: the timeline is at %d of %d before the last byte of the first message arrived", round,
				timeline.Value(), value)
		}
		for i, op := range ops {
			if _, err := wait(t, op, nil); err != nil != (i == 3 || i == 7) {
				t.Fatalf("round %d: operation %d: %v", round, i, err)
			}
		}
		if timeline.Value() != value+3 {
			t.Errorf("round %d: the timeline is at %d, want %d", round, timeline.Value(), value+3)
		}
	}
}
