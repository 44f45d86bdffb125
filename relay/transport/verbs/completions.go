package verbs

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/peerlane/peerlane/relay/poll"
	"github.com/peerlane/peerlane/relay/verbs"
)

// A NIC has one completion queue for the queue pairs of every group, so that an iteration of the
// event loop polls a NIC once, however many peers the relay has. A map leads from the number of a
// queue pair to the group. Groups reserve room, and the queue grows by ibv_resize_cq; a provider
// without that call gets another queue of twice the size.

// completionQueue is a completion queue that groups share. Goroutines that connect a group poll it as
// well as the event loop.
type completionQueue struct {
	*verbs.Queue
	context *verbs.Context

	mu       sync.Mutex
	groups   map[uint32]*queue // by number of the queue pair
	room     int               // completions
	reserved int
	broken   bool // no group may reserve more room
	batch    [batchSize]verbs.Completion
}

// completions are the completion queues of a relay.
type completions struct {
	shared    map[*verbs.Context][]*completionQueue // under the Fabric's mu
	reserving sync.Mutex                            // held by the goroutine that creates or enlarges a queue
	// The event loop owns the following fields: the polled queues, and the groups with work.
	polled     []*completionQueue
	due        []*QPGroup
	spare      []*QPGroup
	completed  time.Duration // time of the last completion, on the loop's clock
	processors int
}

// minEntries is the size of the first completion queue of a NIC.
const minEntries = 4096

// reserve returns a completion queue of a NIC with room for entries more completions, and creates a
// queue if necessary. It blocks.
func (f *Fabric) reserve(n *nic, entries int) (*completionQueue, error) {
	f.reserving.Lock()
	defer f.reserving.Unlock()
	f.mu.Lock()
	all := slices.Clone(f.shared[n.context])
	f.mu.Unlock()
	size := minEntries
	for _, c := range all {
		if c.reserve(entries, n.limits.QueueEntries) {
			return c, nil
		}
		size = max(size, 2*c.room)
	}
	if limit := n.limits.QueueEntries; limit > 0 {
		size = min(size, limit)
	}
	made, err := n.context.NewQueue(max(size, entries))
	if err != nil {
		return nil, err
	}
	c := &completionQueue{Queue: made, context: n.context, groups: map[uint32]*queue{}, room: made.Entries(),
		reserved: entries}
	f.mu.Lock()
	f.shared[n.context] = append(f.shared[n.context], c)
	f.mu.Unlock()
	f.loop.Do(func() {
		f.polled = append(f.polled, c)
		if err := f.loop.Watch(c.FD(), func(uint32) {
			if err := c.Acknowledge(); err != nil {
				f.queueFailed(c, err)
			}
		}); err != nil {
			f.queueFailed(c, err)
		}
	})
	return c, nil
}

// reserve reserves room for completions and enlarges a queue without enough room.
func (c *completionQueue) reserve(entries, limit int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	need := c.reserved + entries
	if c.broken || limit > 0 && need > limit {
		return false
	}
	if need > c.room {
		size := max(2*c.room, need)
		if limit > 0 {
			size = min(size, limit)
		}
		if c.Resize(size) != nil { // not supported, or no memory
			return false
		}
		c.room = c.Entries()
	}
	c.reserved = need
	return true
}

func (c *completionQueue) release(entries int) {
	c.mu.Lock()
	c.reserved -= entries
	c.mu.Unlock()
}

// join assigns the completions of a queue pair to a group.
func (c *completionQueue) join(pair uint32, q *queue) {
	c.mu.Lock()
	c.groups[pair] = q
	c.mu.Unlock()
}

func (c *completionQueue) leave(pair uint32) {
	c.mu.Lock()
	delete(c.groups, pair)
	c.mu.Unlock()
}

// take polls the device once and adds the completions to the inboxes of the groups. take calls
// found for each group with new completions. The caller holds mu.
func (c *completionQueue) take(found func(*QPGroup)) (int, error) {
	n, err := c.Queue.Poll(c.batch[:])
	var last *queue
	for _, one := range c.batch[:n] {
		q := c.groups[one.Pair]
		if q == nil {
			continue // the queue pair is gone
		}
		q.inbox = append(q.inbox, one)
		if q != last {
			last = q
			found(q.set)
		}
	}
	return n, err
}

// Poll polls the device and returns completions of the group's queue pairs, oldest first.
func (q *queue) Poll(into []verbs.Completion) (int, error) { return q.read(into, true) }

// read returns completions of the group's queue pairs, oldest first. read polls the device if ask
// is set, or if Fabric.Poll no longer polls the queue.
func (q *queue) read(into []verbs.Completion, ask bool) (int, error) {
	c, s := q.completionQueue, q.set
	var others []*QPGroup
	poll.Lock(&c.mu)
	var err error
	ask = ask || c.broken
	for n := batchSize; ask && len(q.inbox) < len(into) && n == batchSize && err == nil; {
		n, err = c.take(func(other *QPGroup) {
			if other != s && !slices.Contains(others, other) {
				others = append(others, other)
			}
		})
	}
	n := copy(into, q.inbox)
	q.inbox = slices.Delete(q.inbox, 0, n)
	c.mu.Unlock()
	if len(others) > 0 {
		wake := func() {
			for _, other := range others {
				other.touch()
			}
		}
		if s.working { // a goroutine polls
			s.fabric.loop.Do(wake)
		} else {
			wake()
		}
	}
	return n, err
}

// touch schedules a group for the next iteration of the event loop.
func (s *QPGroup) touch() {
	if !s.touched {
		s.touched = true
		s.fabric.due = append(s.fabric.due, s)
	}
}

// Poll takes completions from every NIC and runs the groups with completions or waiting requests.
func (f *Fabric) Poll() bool {
	progress := false
	for _, c := range f.polled {
		if !c.mu.TryLock() { // a goroutine polls
			continue
		}
		var err error
		for n := batchSize; n == batchSize && err == nil; {
			n, err = c.take((*QPGroup).touch)
			progress = progress || n > 0
		}
		c.mu.Unlock()
		if err != nil {
			f.queueFailed(c, err)
			return true
		}
	}
	if progress {
		f.completed = f.loop.Now()
	}
	if len(f.due) == 0 {
		return progress
	}
	due := f.due
	f.due, f.spare = f.spare[:0], nil
	for i, s := range due {
		due[i], s.touched = nil, false
		if s.poll() {
			progress = true
		}
		if s.phase == draining || s.waitingParts > 0 && s.phase == running {
			s.touch()
		}
	}
	f.spare = due[:0]
	return progress
}

// On a host with many processors the loop spins between completions in short succession: a wakeup
// takes longer than the copies and writes of a MiB.
const (
	manyProcessors = 16
	activeTime     = time.Millisecond
	activeSpin     = 200 * time.Microsecond
)

// Spin returns how long the loop spins. The event loop calls it (package poll).
func (f *Fabric) Spin() time.Duration {
	if f.processors < manyProcessors || f.completed == 0 || f.loop.Now()-f.completed > activeTime {
		return 0
	}
	return activeSpin
}

// Busy reports whether a group drains its posted requests, which has a time limit.
func (f *Fabric) Busy() bool {
	return slices.ContainsFunc(f.due, func(s *QPGroup) bool { return s.phase == draining })
}

// Arm requests an event from each NIC for the next completion.
func (f *Fabric) Arm() bool {
	more := false
	for _, c := range f.polled {
		if !c.mu.TryLock() {
			more = true
			continue
		}
		err := c.Queue.Arm()
		n := 0
		if err == nil {
			n, err = c.take((*QPGroup).touch) // completions from before Arm
		}
		c.mu.Unlock()
		if err != nil {
			f.queueFailed(c, err)
			return true
		}
		more = more || n > 0
	}
	return more || slices.ContainsFunc(f.due, (*QPGroup).hasWork)
}

// Disarm has nothing to reverse.
func (f *Fabric) Disarm() {}

// hasWork reports whether a group can go on now.
func (s *QPGroup) hasWork() bool {
	if s.closed || s.working {
		return false
	}
	return s.unread() || s.phase == running && s.waitingParts > 0 && !s.broken && !s.parting && s.room()
}

// unread reports whether completions wait for a group.
func (s *QPGroup) unread() bool {
	return slices.ContainsFunc(s.queues, func(q *queue) bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return len(q.inbox) > 0
	})
}

// queueFailed fails the groups that share a completion queue: the queue returns no more
// completions.
func (f *Fabric) queueFailed(c *completionQueue, err error) {
	f.retireQueue(c)
	for s := range f.sets {
		for _, q := range s.queues {
			if !s.working && q.completionQueue == c {
				s.failed(q.nic, err.Error())
				break
			}
		}
	}
}

// retireQueue closes a completion queue to new groups.
func (f *Fabric) retireQueue(c *completionQueue) {
	c.mu.Lock()
	c.broken = true
	c.mu.Unlock()
	if i := slices.Index(f.polled, c); i >= 0 {
		f.polled = slices.Delete(f.polled, i, i+1)
		f.loop.Unwatch(c.FD())
	}
}

// closeQueues destroys the completion queues after every queue pair is gone and the event loop has
// ended.
func (f *Fabric) closeQueues() (err error) {
	for _, all := range f.shared {
		for _, c := range all {
			err = errors.Join(err, c.Close())
		}
	}
	clear(f.shared)
	return err
}
