package relay

import "github.com/peerlane/peerlane/relay/internal/statemachine"

// The objects below are withdrawn in two steps: first no new user may begin, and after the last user the
// object goes. The events idle come whenever an object has no users.

// lifeState is the state of a region or of a client's event.
type lifeState uint8

const (
	lifeLive    lifeState = iota
	lifeRevoked           // no new user; users remain
	lifeGone
)

type lifeEvent uint8

const (
	lifeRevoke lifeEvent = iota
	lifeIdle             // no user
)

type lifeAction uint8

const (
	lifeNothing lifeAction = iota
	lifeSettle             // refuse new users, and free without users
	lifeFree
)

// lifeTable has the cells of a region and of an event.
var lifeTable = statemachine.New("region", statemachine.Names{
	States:  []string{"live", "revoked", "gone"},
	Events:  []string{"revoke", "idle"},
	Actions: []string{"none", "settle", "free"},
}, statemachine.Cells[lifeState, lifeEvent, lifeAction]{
	lifeLive: {
		lifeRevoke: {Next: lifeRevoked, Action: lifeSettle},
		lifeIdle:   {Next: lifeLive},
	},
	lifeRevoked: {
		lifeIdle: {Next: lifeGone, Action: lifeFree},
	},
	lifeGone: {
		lifeIdle: {Next: lifeGone},
	},
})

// memoryState is the state of a client's memory.
type memoryState uint8

const (
	memoryEmpty    memoryState = iota // host memory without pages: no operation uses it
	memoryPinning                     // a goroutine pins the pages that the client has allocated
	memoryExported                    // operations use it
	memoryRetired                     // no new operation; users remain
	memoryGone
)

// ended reports whether no operation may begin any more.
func (s memoryState) ended() bool { return s == memoryRetired || s == memoryGone }

type memoryEvent uint8

const (
	memoryPopulate  memoryEvent = iota // the client has allocated the pages
	memoryPinned                       // the pages are pinned
	memoryPinFailed                    // the pages are not pinned
	memoryRetire                       // the client or its session ends the memory
	memoryLocal                        // only operations of the client use it
	memoryIdle                         // no operation uses it
)

type memoryAction uint8

const (
	memoryNothing memoryAction = iota
	memoryPin
	memoryRevoke // revoke the regions, and free without users
	memoryAnswer // answer the request that waits for the end of remote operations
	memoryFree
)

// memoryTable has the cells of a memory.
var memoryTable = statemachine.New("memory", statemachine.Names{
	States:  []string{"empty", "pinning", "exported", "retired", "gone"},
	Events:  []string{"populated", "pinned", "not pinned", "retire", "local", "idle"},
	Actions: []string{"none", "pin", "revoke", "answer", "free"},
}, statemachine.Cells[memoryState, memoryEvent, memoryAction]{
	memoryEmpty: {
		memoryPopulate: {Next: memoryPinning, Action: memoryPin},
		memoryRetire:   {Next: memoryRetired, Action: memoryRevoke},
		memoryIdle:     {Next: memoryEmpty},
	},
	memoryPinning: {
		memoryPinned:    {Next: memoryExported},
		memoryPinFailed: {Next: memoryEmpty},
		memoryRetire:    {Next: memoryRetired, Action: memoryRevoke},
	},
	memoryExported: {
		memoryRetire: {Next: memoryRetired, Action: memoryRevoke},
		memoryLocal:  {Next: memoryExported},
		memoryIdle:   {Next: memoryExported},
	},
	memoryRetired: {
		memoryPinned:    {Next: memoryRetired},
		memoryPinFailed: {Next: memoryRetired},
		memoryRetire:    {Next: memoryRetired},
		memoryLocal:     {Next: memoryRetired, Action: memoryAnswer},
		memoryIdle:      {Next: memoryGone, Action: memoryFree},
	},
	memoryGone: {
		memoryIdle: {Next: memoryGone},
	},
})

// targetState is the state of a receiver's memory at the sender.
type targetState uint8

const (
	targetMapping   targetState = iota // the link maps the memory; grants wait
	targetForgotten                    // the same, and the receiver has taken the memory back
	targetReady                        // grants are filled
	targetFailed                       // the memory cannot be mapped; the connection is down
	targetRetired                      // taken back; grants remain, whose writes the receiver has seen
	targetGone
)

// ready reports whether grants can be filled.
func (s targetState) ready() bool { return s == targetReady || s == targetRetired }

// revoked reports whether the receiver has taken the memory back.
func (s targetState) revoked() bool {
	return s == targetForgotten || s == targetRetired || s == targetGone
}

type targetEvent uint8

const (
	targetMapped    targetEvent = iota
	targetMapFailed             // the link cannot map the memory
	targetForget                // the receiver takes the memory back
	targetIdle                  // no grant remains
)

type targetAction uint8

const (
	targetNothing targetAction = iota
	targetSettle               // remove the memory without grants
	targetRemove
)

// targetTable has the cells of a target.
var targetTable = statemachine.New("target", statemachine.Names{
	States:  []string{"mapping", "forgotten", "ready", "failed", "retired", "gone"},
	Events:  []string{"mapped", "not mapped", "forget", "idle"},
	Actions: []string{"none", "settle", "remove"},
}, statemachine.Cells[targetState, targetEvent, targetAction]{
	targetMapping: {
		targetMapped:    {Next: targetReady},
		targetMapFailed: {Next: targetFailed},
		targetForget:    {Next: targetForgotten},
		targetIdle:      {Next: targetMapping},
	},
	targetForgotten: {
		targetMapped:    {Next: targetRetired, Action: targetSettle},
		targetMapFailed: {Next: targetFailed},
		targetForget:    {Next: targetForgotten},
		targetIdle:      {Next: targetForgotten},
	},
	targetReady: {
		targetForget: {Next: targetRetired, Action: targetSettle},
		targetIdle:   {Next: targetReady},
	},
	targetFailed: {
		targetIdle: {Next: targetFailed},
	},
	targetRetired: {
		targetForget: {Next: targetRetired},
		targetIdle:   {Next: targetGone, Action: targetRemove},
	},
	targetGone: {
		targetIdle: {Next: targetGone},
	},
})
