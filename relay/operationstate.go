package relay

import "github.com/peerlane/peerlane/relay/internal/statemachine"

// operationState is the state of an operation. The client gets exactly one completion of an operation,
// and no access to the client's memory is in flight afterwards.
type operationState uint8

const (
	operationWaiting           operationState = iota // for a timeline, an event or a turn
	operationUnready                                 // the event of a waiting operation failed
	operationStarted                                 // the connection's side executes it
	operationWithdrawn                               // the same, and the remote side is asked to forget the message
	operationAnswered                                // of a buffered send: the client has the completion
	operationDelivered                               // the receiver has the message; own accesses are in flight
	operationAnsweredDelivered                       // the same, and the client has the completion
	operationFailing                                 // failed; own accesses are in flight
	operationAnsweredFailing                         // the same, and the client has the completion
	operationEnded
)

// delivered reports whether the receiver has the whole message.
func (s operationState) delivered() bool {
	return s == operationDelivered || s == operationAnsweredDelivered
}

// operationEvent is an event of an operation.
type operationEvent uint8

const (
	operationBegin       operationEvent = iota // the operation is due
	operationEventFailed                       // the driver cannot query the event that the operation waits for
	operationCancel                            // the client cancels it
	operationBuffered                          // the buffer has the message
	operationDeliver                           // the receiver has the message
	operationRefuse                            // the receiver has dropped the message
	operationContradict                        // the receiver has reported bytes that were not sent
	operationDown                              // the connection is down
	operationIdle                              // no access to the memory is in flight
	operationEnd                               // it ends with a status
)

type operationAction uint8

const (
	operationNothing operationAction = iota
	operationStart
	operationStartFailed
	operationWithdraw
	operationAnswer
	operationSettle
	operationSettleFailure
	operationConclude
	operationReportUnstarted
	operationReport
	operationReportFailure
	operationRelease
	operationReleaseFailure
)

// operationTable has the cells of an operation.
var operationTable = statemachine.New("operation", statemachine.Names{
	States: []string{"waiting", "event failed", "started", "withdrawn", "answered", "delivered",
		"answered, delivered", "failing",
		"answered, failing", "ended"},
	Events: []string{"begin", "event fails", "cancel", "buffered", "delivered", "refused", "contradicted",
		"connection down", "idle", "end"},
	Actions: []string{"none", "start", "start, report unknown event", "withdraw", "answer", "settle",
		"keep failure, settle",
		"conclude", "report unstarted", "report", "report failure", "release", "release with failure"},
}, statemachine.Cells[operationState, operationEvent, operationAction]{
	operationWaiting: {
		operationBegin:       {Next: operationStarted, Action: operationStart},
		operationEventFailed: {Next: operationUnready},
		operationEnd:         {Next: operationEnded, Action: operationReportUnstarted},
	},
	operationUnready: {
		operationBegin: {Next: operationEnded, Action: operationStartFailed},
		operationEnd:   {Next: operationEnded, Action: operationReportUnstarted},
	},
	operationStarted: {
		operationCancel:   {Next: operationWithdrawn, Action: operationWithdraw},
		operationBuffered: {Next: operationAnswered, Action: operationAnswer},
		operationDeliver:  {Next: operationDelivered, Action: operationSettle},
		operationRefuse:   {Next: operationFailing, Action: operationSettleFailure},
		operationDown:     {Next: operationFailing, Action: operationSettleFailure},
		operationIdle:     {Next: operationStarted},
		operationEnd:      {Next: operationEnded, Action: operationReport},
	},
	operationWithdrawn: {
		operationCancel:   {Next: operationWithdrawn},
		operationBuffered: {Next: operationWithdrawn},
		operationDeliver:  {Next: operationDelivered, Action: operationSettle},
		operationRefuse:   {Next: operationFailing, Action: operationSettleFailure},
		operationDown:     {Next: operationFailing, Action: operationSettleFailure},
		operationIdle:     {Next: operationWithdrawn},
		operationEnd:      {Next: operationEnded, Action: operationReport},
	},
	operationAnswered: {
		operationCancel:  {Next: operationAnswered},
		operationDeliver: {Next: operationAnsweredDelivered, Action: operationSettle},
		operationRefuse:  {Next: operationAnsweredFailing, Action: operationSettleFailure},
		operationDown:    {Next: operationAnsweredFailing, Action: operationSettleFailure},
		operationIdle:    {Next: operationAnswered},
	},
	operationDelivered: {
		operationCancel:     {Next: operationDelivered},
		operationBuffered:   {Next: operationAnsweredDelivered, Action: operationAnswer},
		operationContradict: {Next: operationFailing, Action: operationSettleFailure},
		operationDown:       {Next: operationDelivered},
		operationIdle:       {Next: operationDelivered, Action: operationConclude},
		operationEnd:        {Next: operationEnded, Action: operationReport},
	},
	operationAnsweredDelivered: {
		operationCancel:     {Next: operationAnsweredDelivered},
		operationContradict: {Next: operationAnsweredFailing, Action: operationSettleFailure},
		operationDown:       {Next: operationAnsweredDelivered},
		operationIdle:       {Next: operationAnsweredDelivered, Action: operationConclude},
		operationEnd:        {Next: operationEnded, Action: operationRelease},
	},
	operationFailing: {
		operationCancel:   {Next: operationFailing},
		operationBuffered: {Next: operationFailing},
		operationIdle:     {Next: operationEnded, Action: operationReportFailure},
	},
	operationAnsweredFailing: {
		operationCancel: {Next: operationAnsweredFailing},
		operationIdle:   {Next: operationEnded, Action: operationReleaseFailure},
	},
	operationEnded: {
		operationCancel: {Next: operationEnded},
		operationIdle:   {Next: operationEnded},
		operationEnd:    {Next: operationEnded},
	},
})
