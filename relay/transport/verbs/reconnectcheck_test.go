package verbs

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/relay/internal/statemachine/statetest"
)

// The checker explores every order of events of two relays that reset their queue pairs. The relays
// execute reconnectProtocol, with its tables and actions; control streams, NICs and writes are fakes. A
// step is the delivery of a message, an arrival, a completion, the end of a goroutine or of flushes, a post
// of a client, or a fault.

// checkedPhase is the state of the fake queue pairs of a relay.
type checkedPhase uint8

const (
	checkedConnecting checkedPhase = iota
	checkedBuilding                // a goroutine builds queue pairs; then the next message follows
	checkedRunning
	checkedTearing // the queue pairs fail and are released
	checkedGone    // no queue pairs
)

// checkedMessage is a message of the control stream: of the reset, of the negotiation, or a ticket.
type checkedMessage struct {
	kind    string
	epoch   uint32
	arrived uint64
	write   int
}

// checkedWrite is a write from a client of one relay to the memory of the other.
type checkedWrite struct {
	from int
	// The sender's side.
	wanted, ticket, posted, doubtful, done bool
	// The receiver's side: granted is that a ticket is outstanding, again that its write is in doubt.
	granted, again, applied bool
	// The network: flying has the request, of queue pairs of an epoch; landed that the receiver has the bytes.
	flying, landed bool
	epoch          uint32
	// How often the bytes arrived and the client got the end.
	arrivals, ends int
}

// checkedRelay is a relay. It implements reconnectEnvironment.
type checkedRelay struct {
	protocol reconnectProtocol
	phase    checkedPhase
	begun    bool
	catching bool
	asked    int // calls of catchingUp in this step
	all      *checked
	number   int
}

// checked is a state of both relays, the streams and the writes.
type checked struct {
	relays [2]checkedRelay
	stream [2][]checkedMessage // to each relay
	writes []checkedWrite
	faults int // that may still happen
}

func (c *checked) clone() *checked {
	next := *c
	for i := range next.relays {
		next.stream[i] = slices.Clone(c.stream[i])
		next.relays[i].all, next.relays[i].asked = &next, 0
		next.relays[i].protocol.environment = &next.relays[i]
	}
	next.writes = slices.Clone(c.writes)
	return &next
}

// key identifies a state.
func (c *checked) key() string {
	text := fmt.Sprint(c.faults, c.stream, c.writes)
	for i := range c.relays {
		r, p := &c.relays[i], &c.relays[i].protocol
		text += fmt.Sprint(r.phase, r.begun, r.catching, p.release, p.agreement, p.epoch, p.acknowledged,
			p.acknowledgedBefore, p.arrived, p.arrivedThere)
	}
	return text
}

func (r *checkedRelay) send(m any) {
	message := checkedMessage{}
	switch m := m.(type) {
	case *reset:
		message = checkedMessage{kind: "reset", epoch: m.Epoch}
	case *resetAck:
		message = checkedMessage{kind: "ack", epoch: m.Epoch, arrived: m.Arrived}
	case *step:
		message = checkedMessage{kind: "granted", epoch: m.Epoch}
		if m.Kind == kindResume {
			message.kind = "resume"
		}
	}
	r.tell(message)
}

func (r *checkedRelay) tell(m checkedMessage) {
	r.all.stream[1-r.number] = append(r.all.stream[1-r.number], m)
}

func (r *checkedRelay) resetLocal(string) { r.phase = checkedTearing }

func (r *checkedRelay) recall() {
	for i := range r.all.writes {
		w := &r.all.writes[i]
		switch {
		case w.from == r.number:
			w.ticket = false
			w.doubtful = w.posted && !w.done
		case w.granted:
			w.granted, w.again = false, true
		}
	}
}

func (r *checkedRelay) renegotiate() { r.phase, r.begun = checkedConnecting, false }

// catchingUp panics in an endless recursion, which a changed table can cause.
func (r *checkedRelay) catchingUp() bool {
	if r.asked++; r.asked > 100 {
		panic("endless recursion")
	}
	return r.catching
}

// grantAgain issues tickets for the writes that have not arrived.
func (r *checkedRelay) grantAgain() (bool, error) {
	for i := range r.all.writes {
		if w := &r.all.writes[i]; w.from != r.number && !w.applied {
			w.granted, w.again = true, false
			r.tell(checkedMessage{kind: "ticket", write: i})
		}
	}
	return true, nil
}

func (r *checkedRelay) doubtful() (n int, end func()) {
	var there []*checkedWrite
	for i := range r.all.writes {
		if w := &r.all.writes[i]; w.from == r.number && w.doubtful {
			there = append(there, w)
		}
	}
	return len(there), func() {
		for _, w := range there {
			w.doubtful = false
			r.end(w)
		}
	}
}

func (r *checkedRelay) agreed() {}

func (r *checkedRelay) hasPairs() bool { return r.phase == checkedRunning || r.phase == checkedTearing }

func (r *checkedRelay) end(w *checkedWrite) {
	w.done = true
	w.ends++
	r.protocol.acknowledged++
}

// start begins the use of new queue pairs, as QPGroup.start.
func (r *checkedRelay) start() error {
	r.phase = checkedRunning
	r.send(&step{Kind: kindResume, Epoch: r.protocol.epoch})
	for i := range r.all.writes {
		r.catching = r.catching || r.all.writes[i].from != r.number && r.all.writes[i].again
	}
	if r.catching {
		return nil
	}
	return r.protocol.flushed()
}

// handle handles a message, as QPGroup.HandleMessage.
func (r *checkedRelay) handle(m checkedMessage) error {
	p := &r.protocol
	switch m.kind {
	case "reset":
		return p.asked(&reset{Epoch: m.epoch})
	case "ack":
		return p.acked(&resetAck{Epoch: m.epoch, Arrived: m.arrived})
	case "resume", "granted":
		if p.release != releaseIdle || r.phase == checkedTearing || r.phase == checkedGone {
			return nil
		}
		kind := uint32(kindGranted)
		if m.kind == "resume" {
			kind = kindResume
		}
		return p.stepped(&step{Kind: kind, Epoch: m.epoch}, r.phase == checkedRunning)
	case "ticket":
		w := &r.all.writes[m.write]
		switch {
		case r.phase != checkedRunning:
			return nil
		case w.posted && !w.doubtful || w.ticket:
			return fmt.Errorf("second ticket for write %d", m.write)
		}
		w.ticket, w.doubtful = true, false
		if w.posted {
			r.post(w)
		}
		return nil
	}
	if p.stale() {
		return nil
	}
	switch {
	case m.kind == "offer" && !r.begun && r.phase == checkedConnecting:
		r.begun, r.phase = true, checkedBuilding
	case m.kind == "ready" && r.begun && r.phase == checkedConnecting:
		r.tell(checkedMessage{kind: "use"})
		return r.start()
	case m.kind == "use" && r.begun && r.phase == checkedConnecting:
		return r.start()
	default:
		return fmt.Errorf("unexpected %s", m.kind)
	}
	return nil
}

func (r *checkedRelay) post(w *checkedWrite) {
	w.posted, w.ticket, w.flying, w.landed, w.epoch = true, false, true, false, r.protocol.epoch
}

// take processes the arrival of a write at the receiver.
func (r *checkedRelay) take(w *checkedWrite) error {
	if !w.granted {
		return fmt.Errorf("arrival without a ticket")
	}
	w.flying, w.granted, w.applied = false, false, true
	w.landed = true
	w.arrivals++
	r.protocol.arrived++
	return nil
}

// steps calls try with each possible step. fault tells whether the step is a fault.
func (c *checked) steps(try func(name string, fault bool, apply func(*checked) error)) {
	for i := range c.relays {
		r := &c.relays[i]
		if len(c.stream[i]) > 0 {
			try(fmt.Sprintf("%d handles %v", i, c.stream[i][0]), false, func(c *checked) error {
				m := c.stream[i][0]
				c.stream[i] = c.stream[i][1:]
				return c.relays[i].handle(m)
			})
		}
		switch {
		case i == 0 && r.phase == checkedConnecting && !r.begun: // the dialing side
			try("0 begins", false, func(c *checked) error {
				c.relays[0].begun = true
				c.relays[0].tell(checkedMessage{kind: "offer"})
				return nil
			})
		case r.phase == checkedBuilding:
			try(fmt.Sprintf("%d has built", i), false, func(c *checked) error {
				c.relays[i].phase = checkedConnecting
				c.relays[i].tell(checkedMessage{kind: "ready"})
				return nil
			})
		case r.phase == checkedTearing:
			try(fmt.Sprintf("%d has released", i), false, func(c *checked) error {
				c.relays[i].phase, c.relays[i].catching = checkedGone, false
				c.relays[i].protocol.released()
				return nil
			})
		}
		if r.catching && r.phase == checkedRunning {
			try(fmt.Sprintf("%d has flushed", i), false, func(c *checked) error {
				c.relays[i].catching = false
				return c.relays[i].protocol.flushed()
			})
		}
		if c.faults > 0 && r.protocol.release == releaseIdle {
			try(fmt.Sprintf("fault at %d", i), true, func(c *checked) error {
				c.faults--
				c.relays[i].protocol.faulted(&reset{Kind: kindReset})
				return nil
			})
		}
	}
	for k := range c.writes {
		c.writeSteps(k, try)
	}
}

// writeSteps calls try with the steps of a write.
func (c *checked) writeSteps(k int, try func(name string, fault bool, apply func(*checked) error)) {
	w := &c.writes[k]
	sender, receiver := &c.relays[w.from], &c.relays[1-w.from]
	if !w.wanted {
		try(fmt.Sprintf("the client wants write %d", k), false, func(c *checked) error {
			c.writes[k].wanted = true
			return nil
		})
	}
	if w.wanted && w.ticket && sender.phase == checkedRunning {
		try(fmt.Sprintf("write %d is posted", k), false, func(c *checked) error {
			c.relays[c.writes[k].from].post(&c.writes[k])
			return nil
		})
	}
	// The packets of a failed queue pair may be on the way until the receiver has released its own. A later
	// queue pair rejects them.
	if w.flying && w.epoch == receiver.protocol.epoch && receiver.hasPairs() {
		try(fmt.Sprintf("write %d arrives", k), false, func(c *checked) error {
			return c.relays[1-c.writes[k].from].take(&c.writes[k])
		})
	}
	if w.posted && w.landed && !w.done && !w.doubtful && sender.hasPairs() {
		try(fmt.Sprintf("write %d completes", k), false, func(c *checked) error {
			w := &c.writes[k]
			c.relays[w.from].end(w)
			return nil
		})
	}
}

// violation returns a broken invariant of a state. last is that no step is left but faults.
func (c *checked) violation(last bool) string {
	for k, w := range c.writes {
		switch {
		case w.arrivals > 1 || w.ends > 1:
			return fmt.Sprintf("write %d: %d arrivals, %d ends", k, w.arrivals, w.ends)
		case w.ends > w.arrivals:
			return fmt.Sprintf("write %d ended without its arrival", k)
		case last && w.ends == 0:
			return fmt.Sprintf("write %d never ends", k)
		}
	}
	if !last {
		return ""
	}
	for i := range c.relays {
		r := &c.relays[i]
		if r.phase != checkedRunning || r.protocol.release != releaseIdle || r.protocol.agreement != agreementComplete {
			return fmt.Sprintf("relay %d stays in phase %d, %s, %s", i, r.phase, releaseTable.States[r.protocol.release],
				agreementTable.States[r.protocol.agreement])
		}
	}
	return ""
}

// checkedTrace is a state and the step to it.
type checkedTrace struct {
	state  *checked
	before *checkedTrace
	step   string
}

func (t *checkedTrace) String() string {
	if t.before == nil {
		return "start"
	}
	return t.before.String() + "\n  " + t.step
}

// explore visits every state from two connected relays on, and returns the number of states and ends. The
// error has the steps to the first violation.
func explore(from []int, faults int) (states, ends int, err error) {
	c := &checked{faults: faults}
	for i := range c.relays {
		r := &c.relays[i]
		r.all, r.number, r.phase, r.begun = c, i, checkedRunning, true
		r.protocol.environment = r
		if err := safely(func() error { r.protocol.first(); return nil }); err != nil {
			return 0, 0, err
		}
	}
	for _, sender := range from {
		c.writes = append(c.writes, checkedWrite{from: sender})
	}
	for i := range c.relays {
		_, _ = c.relays[i].grantAgain() // the first tickets
	}
	seen := map[string]bool{c.key(): true}
	for queue := []*checkedTrace{{state: c}}; len(queue) > 0 && err == nil; {
		at := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		states++
		last := true
		at.state.steps(func(name string, fault bool, apply func(*checked) error) {
			last = last && fault
			next := &checkedTrace{state: at.state.clone(), before: at, step: name}
			if failed := safely(func() error { return apply(next.state) }); failed != nil && err == nil {
				err = fmt.Errorf("%v\n%v", failed, next)
			}
			if key := next.state.key(); !seen[key] {
				seen[key] = true
				queue = append(queue, next)
			}
		})
		if last {
			ends++
		}
		if broken := at.state.violation(last); broken != "" && err == nil {
			err = fmt.Errorf("%s\n%v", broken, at)
		}
	}
	return states, ends, err
}

// safely returns a panic of f as an error.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f()
}

// TestReconnectLosesAndDoublesNothingInAnyOrder explores two relays, two writes and two faults.
func TestReconnectLosesAndDoublesNothingInAnyOrder(t *testing.T) {
	for name, from := range map[string][]int{"two writes of one relay": {0, 0}, "a write of each relay": {0, 1}} {
		t.Run(name, func(t *testing.T) {
			states, ends, err := explore(from, 2)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d states visited, %d of them without a further step", states, ends)
		})
	}
}

// TestReconnectMutantsAreDetected changes cells of the tables, and demands that the exploration finds a
// violation, except for as many changes as are known to have no effect on the two relays. It takes each
// 48th change, and all changes in make soak-model.
func TestReconnectMutantsAreDetected(t *testing.T) {
	step, limit := 48, 4
	if os.Getenv("PEERLANE_RECONNECT_MUTANTS") == "all" {
		step, limit = 1, 142
	}
	var survivors []string
	changes, mutants := 0, 0
	for _, m := range []statetest.Machine{statetest.Live(releaseTable), statetest.Live(agreementTable)} {
		statetest.Mutate(m, func(name string) {
			if changes++; changes%step != 0 {
				return
			}
			mutants++
			for faults := range 3 {
				for _, from := range [][]int{{0, 0}, {0, 1}} {
					if _, _, err := explore(from, faults); err != nil {
						return
					}
				}
			}
			survivors = append(survivors, m.Title()+": "+name)
		})
	}
	if mutants == 0 || len(survivors) > limit {
		t.Errorf("of %d mutants %d survive, want at most %d:\n%s", mutants, len(survivors), limit,
			strings.Join(survivors, "\n"))
	}
	t.Logf("%d mutants, survivors: %d", mutants, len(survivors))
}
