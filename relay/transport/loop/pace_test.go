package loop

import (
	"testing"
	"time"
)

// Writes of all senders together keep the rate, whoever has posted how many, and
// have their turn one after the other.
func TestPace(t *testing.T) {
	p := &pace{perSecond: 1e9}
	greedy, modest := &sender{}, &sender{}
	var order []*sender
	start := time.Now()
	for i := range 30 {
		p.post(greedy, queued{1e6, start, func(time.Duration) { order = append(order, greedy) }})
		if i < 5 {
			p.post(modest, queued{1e6, start, func(time.Duration) { order = append(order, modest) }})
		}
	}
	if len(order) == 35 {
		t.Fatal("35 MB went at once")
	}
	for p.Busy() {
		p.Poll()
	}
	// The last write needs no time after it, and an idle bucket has a little.
	if took, least := time.Since(start), 34*time.Millisecond-burst; took < least {
		t.Errorf("35 MB at 1 GB/s took %v; at least %v was expected", took, least)
	}
	seen := map[*sender]int{}
	for _, s := range order[:11] {
		seen[s]++
	}
	if len(order) != 35 || seen[modest] != 5 {
		t.Errorf("of the first 11 of %d writes %d were the sender's that posted 5", len(order), seen[modest])
	}
}

// What a sender that has gone had queued does not begin.
func TestPaceForgetsWhoIsGone(t *testing.T) {
	p := &pace{perSecond: 1}
	s := &sender{nic: &NIC{senders: map[*sender]bool{}}}
	issued := 0
	for range 3 {
		s.underWay++
		p.post(s, queued{1, time.Now(), func(time.Duration) { issued++; s.underWay-- }})
	}
	s.ended(nil)
	p.due = time.Time{}
	for p.Busy() {
		p.Poll()
	}
	if issued != 1 || s.underWay != 0 {
		t.Errorf("%d writes were issued and %d are under way; the first alone had its turn before the end", issued, s.underWay)
	}
}
