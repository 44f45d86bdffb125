package relay

import "testing"

// user is a connection that requests slots, and releases them in order.
type user struct {
	*connection
	staging *staging
	got     int // so far
	has     []*slot
}

func (u *user) want(messages int) {
	for range messages {
		u.staging.acquire(u.connection, func(s *slot) bool {
			u.got++
			u.has = append(u.has, s)
			return true
		})
	}
}

func (u *user) release(slots int) {
	for range slots {
		first := u.has[0]
		u.has = u.has[1:]
		u.staging.release(first)
	}
}

// newUsers returns connections of a lane with slots slots.
func newUsers(t *testing.T, slots, users int) (*staging, []*user) {
	s := &staging{regions: []*region{{slots: slots, slotBytes: 1}}}
	s.fill()
	var list []*user
	for range users {
		c, _ := counting(t)
		list = append(list, &user{connection: c, staging: s})
	}
	return s, list
}

func TestSlotsAreSharedBetweenConnections(t *testing.T) {
	t.Run("one that many messages wait on has no more than others", func(t *testing.T) {
		s, u := newUsers(t, 8, 3)
		many, few, late := u[0], u[1], u[2]
		many.want(200)
		if len(many.has) != 7 {
			t.Errorf("alone it has %d slots of 8, want all but one", len(many.has))
		}
		few.want(50)
		if len(few.has) != 1 {
			t.Errorf("who comes second has %d slots, want that one", len(few.has))
		}
		many.release(3)
		if len(many.has) != 4 || len(few.has) != 3 {
			t.Errorf("two have %d and %d slots of 8, want four and three", len(many.has), len(few.has))
		}
		began := many.got
		for few.got < 50 {
			many.release(1)
			few.release(1)
		}
		if more := many.got - began; more < 40 || more > 50 {
			t.Errorf("while one had 50 slots the other had %d", more)
		}
		late.want(1)
		many.release(1)
		if len(late.has) != 1 {
			t.Error("the third waits behind all messages of the first")
		}
		few.release(len(few.has))
		late.release(1)
		for len(many.has) > 0 {
			many.release(1)
		}
		if many.got != 200 || len(s.free) != 8 || s.sharing != 0 || len(s.turn) != 0 {
			t.Errorf("of 200 messages %d had a slot; %d slots are free, %d connections share, %d wait", many.got, len(s.free),
				s.sharing, len(s.turn))
		}
	})
	t.Run("who releases none leaves the others theirs", func(t *testing.T) {
		for _, slots := range []int{3, 4, 8, 100} {
			_, u := newUsers(t, slots, 2)
			stuck, well := u[0], u[1]
			stuck.want(1000)
			for range 1000 {
				well.want(1)
				if len(well.has) != 1 {
					t.Fatalf("%d slots: one connection holds %d, and the other gets none", slots, len(stuck.has))
				}
				well.release(1)
			}
		}
	})
	t.Run("of two slots none is kept back", func(t *testing.T) {
		_, u := newUsers(t, minSlots, 1)
		u[0].want(5)
		if len(u[0].has) != minSlots {
			t.Errorf("it has %d", len(u[0].has))
		}
	})
	t.Run("more connections than slots", func(t *testing.T) {
		s, u := newUsers(t, 4, 10)
		for _, one := range u {
			one.want(20)
		}
		for busy := true; busy; {
			busy = false
			for _, one := range u {
				if len(one.has) > 0 {
					one.release(1)
					busy = true
				}
			}
		}
		for i, one := range u {
			if one.got != 20 {
				t.Errorf("connection %d had %d slots of 20", i, one.got)
			}
		}
		if len(s.free) != 4 {
			t.Errorf("%d slots are free", len(s.free))
		}
	})
	t.Run("who does not want it any more gives it to the next", func(t *testing.T) {
		s, u := newUsers(t, 1, 3)
		u[0].want(1)
		s.acquire(u[1].connection, func(*slot) bool { return false })
		u[2].want(1)
		u[0].release(1)
		if u[2].got != 1 || s.sharing != 1 {
			t.Errorf("the next has %d slots, and %d connections share", u[2].got, s.sharing)
		}
	})
}

// Slots are taken by the weights of regions, also if some slots are held for long; a failed region
// gives no slots, and the remaining regions get the share at once.
func TestStagingWithWeightsTakesSlotsByShare(t *testing.T) {
	s := &staging{regions: []*region{{slots: 6, slotBytes: 1, weight: 3}, {slots: 2, slotBytes: 1, weight: 1}}}
	s.fill()
	c, _ := counting(t)
	u := &user{connection: c, staging: s}
	count := func(n int) map[*region]int {
		had := map[*region]int{}
		for range n {
			u.want(1)
			if len(u.has) == 0 {
				t.Fatal("no slot is free")
			}
			had[u.has[len(u.has)-1].region]++
			if len(u.has) == 4 {
				u.release(1)
			}
		}
		return had
	}
	first, second := s.regions[0], s.regions[1]
	if had := count(400); had[first] < 296 || had[first] > 304 {
		t.Errorf("of 400 slots the region of weight 3 had %d, want 300", had[first])
	}
	u.release(len(u.has))
	u.has = nil
	s.fail(first)
	had := map[*region]int{}
	for range 100 {
		u.want(1)
		had[u.has[0].region]++
		u.release(1)
	}
	if had[first] != 0 || had[second] != 100 {
		t.Errorf("after the first has failed it had %d slots, and the second %d", had[first], had[second])
	}
	if len(s.free) != 2 || s.slots != 2 {
		t.Errorf("%d of %d slots are free; those of the failed region are out", len(s.free), s.slots)
	}
	s.fail(second)
	if u.want(1); len(u.has) != 1 {
		t.Error("the last region has failed, and nothing is left: its slots stay")
	}
}
