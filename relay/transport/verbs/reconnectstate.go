package verbs

import "github.com/peerlane/peerlane/relay/internal/statemachine"

// Two relays replace their queue pairs in two machines. The release machine has both relays release their
// queue pairs before a new negotiation; the agreement machine has both relays agree, after the negotiation,
// on the writes that have arrived. reconnectProtocol executes both, without a NIC, so that a test can
// explore every order of events.

// releaseState is the progress of a reset.
type releaseState uint8

const (
	releaseIdle  releaseState = iota // no reset
	releaseOwn                       // both relays release; neither has finished
	releasePeer                      // the peer has released its queue pairs, this side has not
	releaseAwait                     // this side has released its queue pairs, the peer has not
)

type releaseEvent uint8

const (
	releaseFault    releaseEvent = iota // a fault of this side
	releaseAsked                        // the peer asks for a reset
	releaseAcked                        // the peer has released its queue pairs
	releaseReleased                     // this side has released its queue pairs, and processed every arrival
)

type releaseAction uint8

const (
	releaseNothing        releaseAction = iota
	releaseAnnounce                     // ask the peer for the reset, and release
	releaseAck                          // send the number of arrived writes
	releaseAckRenegotiate               // the same, and negotiate
	releaseRenegotiate                  // negotiate
)

// releaseTable has the cells of a reset. Either relay may begin, also both at a time: the requests cross.
var releaseTable = statemachine.New("reset", statemachine.Names{
	States:  []string{"idle", "releasing", "peer released", "released"},
	Events:  []string{"fault", "reset", "ack", "released"},
	Actions: []string{"none", "announce", "send ack", "send ack, renegotiate", "renegotiate"},
}, statemachine.Cells[releaseState, releaseEvent, releaseAction]{
	releaseIdle: {
		releaseFault: {Next: releaseOwn, Action: releaseAnnounce},
		releaseAsked: {Next: releaseOwn, Action: releaseAnnounce},
	},
	releaseOwn: {
		releaseFault:    {Next: releaseOwn},
		releaseAsked:    {Next: releaseOwn},
		releaseAcked:    {Next: releasePeer},
		releaseReleased: {Next: releaseAwait, Action: releaseAck},
	},
	releasePeer: {
		releaseFault:    {Next: releasePeer},
		releaseReleased: {Next: releaseIdle, Action: releaseAckRenegotiate},
	},
	releaseAwait: {
		releaseFault: {Next: releaseAwait},
		releaseAsked: {Next: releaseAwait},
		releaseAcked: {Next: releaseIdle, Action: releaseRenegotiate},
	},
})

// agreementState is the agreement on the writes of both directions: whether this side may send tickets,
// and whether this side knows which of its writes have arrived.
type agreementState uint8

const (
	agreementDoubtful        agreementState = iota // no tickets; own writes are in doubt
	agreementFlushing                              // the peer is ready; flushes of earlier writes are pending
	agreementGranting                              // tickets; own writes are in doubt
	agreementSettled                               // no tickets; own writes are settled
	agreementSettledFlushing                       // the same, and flushes of earlier writes are pending
	agreementComplete                              // tickets; own writes are settled
)

// grants reports whether tickets may be sent.
func (s agreementState) grants() bool { return s == agreementGranting || s == agreementComplete }

type agreementEvent uint8

const (
	agreementFirst   agreementEvent = iota // the first negotiation has ended
	agreementResume                        // the peer has sent its paths
	agreementFlushed                       // no flush of earlier writes is pending
	agreementGranted                       // the peer has sent tickets for the writes that had not arrived
	agreementReset                         // a reset begins
)

type agreementAction uint8

const (
	agreementNothing     agreementAction = iota
	agreementFlush                       // grant again after the flushes
	agreementGrant                       // send keys and tickets again
	agreementGrantAgree                  // the same, and report the agreement
	agreementSettle                      // end the doubtful writes without a ticket: they have arrived
	agreementSettleAgree                 // the same, and report the agreement
)

// agreementTable has the cells of an agreement.
var agreementTable = statemachine.New("agreement", statemachine.Names{
	States:  []string{"doubtful", "flushing", "granting", "settled", "settled, flushing", "complete"},
	Events:  []string{"first", "resume", "flushed", "granted", "reset"},
	Actions: []string{"none", "flush", "grant", "grant, agree", "settle", "settle, agree"},
}, statemachine.Cells[agreementState, agreementEvent, agreementAction]{
	agreementDoubtful: {
		agreementFirst:   {Next: agreementComplete},
		agreementResume:  {Next: agreementFlushing, Action: agreementFlush},
		agreementFlushed: {Next: agreementDoubtful},
		agreementGranted: {Next: agreementSettled, Action: agreementSettle},
		agreementReset:   {Next: agreementDoubtful},
	},
	agreementFlushing: {
		agreementFlushed: {Next: agreementGranting, Action: agreementGrant},
		agreementGranted: {Next: agreementSettledFlushing, Action: agreementSettle},
		agreementReset:   {Next: agreementDoubtful},
	},
	agreementGranting: {
		agreementFlushed: {Next: agreementGranting},
		agreementGranted: {Next: agreementComplete, Action: agreementSettleAgree},
		agreementReset:   {Next: agreementDoubtful},
	},
	agreementSettled: {
		agreementResume:  {Next: agreementSettledFlushing, Action: agreementFlush},
		agreementFlushed: {Next: agreementSettled},
		agreementReset:   {Next: agreementDoubtful},
	},
	agreementSettledFlushing: {
		agreementFlushed: {Next: agreementComplete, Action: agreementGrantAgree},
		agreementReset:   {Next: agreementDoubtful},
	},
	agreementComplete: {
		agreementFlushed: {Next: agreementComplete},
		agreementReset:   {Next: agreementDoubtful},
	},
})

// reconnectEnvironment is the group of a reconnectProtocol.
type reconnectEnvironment interface {
	// send sends a message to the peer.
	send(m any)
	// resetLocal releases the queue pairs of this side. released follows after the release.
	resetLocal(why string)
	// recall prepares the repetition of grants and writes. No queue pair exists.
	recall()
	// renegotiate begins the next negotiation. Neither relay has queue pairs.
	renegotiate()
	// catchingUp reports whether flushes of earlier writes are pending. flushed follows.
	catchingUp() bool
	// grantAgain sends keys and tickets. The result is false if a reset has begun instead.
	grantAgain() (bool, error)
	// doubtful returns the number of writes in doubt without another ticket. end completes these writes.
	doubtful() (n int, end func())
	// agreed is called after both directions have settled the writes in doubt.
	agreed()
}

// reconnectProtocol is the protocol of resets between two relays. The event loop owns it.
type reconnectProtocol struct {
	environment reconnectEnvironment
	release     releaseState
	agreement   agreementState
	epoch       uint32 // number of resets

	// Sequence numbers: acknowledged writes of this side, the count at the last reset, writes that
	// have arrived on this side, and the peer's count of arrived writes at the last reset.
	acknowledged, acknowledgedBefore, arrived, arrivedThere uint64
}

// faulted begins a reset for a reason of this side. During a reset it has no effect.
func (p *reconnectProtocol) faulted(m *reset) {
	m.Epoch = p.epoch
	p.applyRelease(releaseFault, m)
}

// asked handles a reset of the peer.
func (p *reconnectProtocol) asked(m *reset) error {
	if _, possible := releaseTable.Cell(p.release, releaseAsked); !possible || m.Epoch != p.epoch {
		return malformed("reset of epoch %d in epoch %d", m.Epoch, p.epoch)
	}
	p.applyRelease(releaseAsked, m)
	return nil
}

// acked handles the peer's release of its queue pairs.
func (p *reconnectProtocol) acked(m *resetAck) error {
	if _, possible := releaseTable.Cell(p.release, releaseAcked); !possible || m.Epoch != p.epoch {
		return malformed("acknowledged reset of epoch %d in epoch %d", m.Epoch, p.epoch)
	}
	p.arrivedThere = m.Arrived
	p.applyRelease(releaseAcked, nil)
	return nil
}

// released continues after the release of the queue pairs of this side.
func (p *reconnectProtocol) released() { p.applyRelease(releaseReleased, nil) }

// stale reports whether a message of the peer precedes its release of the queue pairs, and so belongs to
// the time before the reset.
func (p *reconnectProtocol) stale() bool { return p.release == releaseOwn || p.release == releaseAwait }

func (p *reconnectProtocol) applyRelease(e releaseEvent, m *reset) {
	switch action := releaseTable.Must(&p.release, e); action {
	case releaseAnnounce:
		p.environment.send(m)
		agreementTable.Must(&p.agreement, agreementReset)
		p.environment.resetLocal(m.reason())
	case releaseAck, releaseAckRenegotiate:
		p.environment.recall()
		p.acknowledgedBefore = p.acknowledged
		p.environment.send(&resetAck{Kind: kindResetAck, Epoch: p.epoch, Arrived: p.arrived})
		if action == releaseAckRenegotiate {
			p.renegotiate()
		}
	case releaseRenegotiate:
		p.renegotiate()
	}
}

func (p *reconnectProtocol) renegotiate() {
	p.epoch++
	p.environment.renegotiate()
}

// first begins the use of the first queue pairs: no write is in doubt.
func (p *reconnectProtocol) first() { agreementTable.Must(&p.agreement, agreementFirst) }

// flushed continues after the flushes of earlier writes.
func (p *reconnectProtocol) flushed() error { return p.applyAgreement(agreementFlushed) }

// stepped handles resume and granted. running reports whether this side has new queue pairs.
func (p *reconnectProtocol) stepped(m *step, running bool) error {
	event := agreementGranted
	if m.Kind == kindResume {
		event = agreementResume
	}
	_, possible := agreementTable.Cell(p.agreement, event)
	if !possible || m.Epoch != p.epoch || !running || p.epoch == 0 {
		return malformed("step %d of epoch %d in epoch %d, agreement %s", m.Kind, m.Epoch, p.epoch,
			agreementTable.States[p.agreement])
	}
	return p.applyAgreement(event)
}

func (p *reconnectProtocol) applyAgreement(e agreementEvent) error {
	switch action := agreementTable.Must(&p.agreement, e); action {
	case agreementFlush:
		if !p.environment.catchingUp() {
			return p.flushed()
		}
	case agreementGrant, agreementGrantAgree:
		if granted, err := p.environment.grantAgain(); !granted {
			return err
		}
		p.environment.send(&step{Kind: kindGranted, Epoch: p.epoch})
		if action == agreementGrantAgree {
			p.environment.agreed()
		}
	case agreementSettle, agreementSettleAgree:
		if err := p.settle(); err != nil {
			return err
		}
		if action == agreementSettleAgree {
			p.environment.agreed()
		}
	}
	return nil
}

// settle ends the writes in doubt that the peer does not grant again.
func (p *reconnectProtocol) settle() error {
	n, end := p.environment.doubtful()
	if p.acknowledgedBefore+uint64(n) != p.arrivedThere {
		return malformed("%d writes have arrived at the peer, which has acknowledged %d and does not grant %d others again",
			p.arrivedThere, p.acknowledgedBefore, n)
	}
	end()
	return nil
}
