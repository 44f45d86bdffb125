// Package statemachine defines state machines as tables. A table has a cell for each state and event: the
// next state and the action, or the mark that the event is impossible in the state. Programs dispatch
// events through the table only, so that the cells are the whole machine: package statetest compares the
// cells with a reviewed file and draws the table for docs/states.
//
// A table has no functions. The owner of the state runs the returned action after the state has changed,
// so an action may apply further events.
package statemachine

import (
	"fmt"
	"slices"
)

// number is the type of states, events and actions: small constants from 0 on.
type number interface{ ~uint8 }

// Cell is the transition for a state and an event.
type Cell[S, A number] struct {
	Next   S
	Action A
}

// Cells has the possible transitions. A missing cell is impossible.
type Cells[S, E, A number] map[S]map[E]Cell[S, A]

// Names names the states, events and actions of a table, by their numbers. The first state is the initial
// state, and action 0 is no action.
type Names struct{ States, Events, Actions []string }

// Table is a state machine. Tests alone change a table after New.
type Table[S, E, A number] struct {
	Name string
	Names
	cells []entry[S, A]
}

type entry[S, A number] struct {
	Cell[S, A]
	possible bool
}

// New returns a table. New panics if a cell has a number without a name.
func New[S, E, A number](name string, names Names, cells Cells[S, E, A]) *Table[S, E, A] {
	t := &Table[S, E, A]{Name: name, Names: names, cells: make([]entry[S, A], len(names.States)*len(names.Events))}
	for state, events := range cells {
		for event, cell := range events {
			t.Set(state, event, cell, true)
		}
	}
	return t
}

// Clone returns a copy of a table, for tests that change the copy.
func (t *Table[S, E, A]) Clone() *Table[S, E, A] {
	c := *t
	c.cells = slices.Clone(t.cells)
	return &c
}

// Apply changes a state by an event and returns the action. An impossible event changes nothing, and
// possible is false: callers return an error for events that a peer or a client can cause.
func (t *Table[S, E, A]) Apply(state *S, event E) (action A, possible bool) {
	e := &t.cells[t.at(*state, event)]
	if e.possible {
		*state = e.Next
	}
	return e.Action, e.possible
}

// Must is Apply for an event that the program alone causes. Must panics with an ImpossibleError, because
// the program no longer knows which memory is in use.
func (t *Table[S, E, A]) Must(state *S, event E) A {
	action, possible := t.Apply(state, event)
	if !possible {
		panic(&ImpossibleError{t.Name, t.States[*state], t.Events[event]})
	}
	return action
}

// Cell returns the cell of a state and an event. possible is false for an impossible event.
func (t *Table[S, E, A]) Cell(state S, event E) (cell Cell[S, A], possible bool) {
	e := t.cells[t.at(state, event)]
	return e.Cell, e.possible
}

// Set replaces a cell, for tests that change a table.
func (t *Table[S, E, A]) Set(state S, event E, cell Cell[S, A], possible bool) {
	if int(cell.Next) >= len(t.States) || int(cell.Action) >= len(t.Actions) {
		panic(fmt.Sprintf("state machine %s: cell %v has a number without a name", t.Name, cell))
	}
	t.cells[t.at(state, event)] = entry[S, A]{cell, possible}
}

func (t *Table[S, E, A]) at(state S, event E) int { return int(state)*len(t.Events) + int(event) }

// ImpossibleError is an event in a state in which the event is impossible: a defect of the program.
type ImpossibleError struct{ Machine, State, Event string }

func (e *ImpossibleError) Error() string {
	return fmt.Sprintf("state machine %s: event %q is impossible in state %q", e.Machine, e.Event, e.State)
}
