package across

import "testing"

// Both sides derive equal messages, of sizes up to the largest. check refuses another message, and
// a message with a changed byte.
func TestMessagesOfBothSidesAreEqual(t *testing.T) {
	const largest = 1 << 20
	ours, theirs := newMessages(7, 0, largest), newMessages(7, 0, largest)
	buffer, scratch := make([]byte, largest), make([]byte, largest)
	var small, large int
	for range 200 {
		number, size := ours.next()
		if n, s := theirs.next(); n != number || s != size || size < 1 || size > largest {
			t.Fatalf("message %d of %d bytes is message %d of %d at the other side", number, size, n, s)
		}
		if size < 1<<10 {
			small++
		} else if size > 1<<18 {
			large++
		}
		got := buffer[:size]
		ours.fill(number, got)
		if err := theirs.check(number, got, scratch); err != nil {
			t.Fatal(err)
		}
		if theirs.check(number+1, got, scratch) == nil && size >= 8 {
			t.Errorf("message %d equals the next message", number)
		}
		if newMessages(7, 1, largest).check(number, got, scratch) == nil && size >= 8 {
			t.Errorf("message %d equals the message of the other side", number)
		}
		got[size/2] ^= 1
		if theirs.check(number, got, scratch) == nil {
			t.Errorf("message %d is taken with byte %d changed", number, size/2)
		}
	}
	if small < 20 || large < 20 {
		t.Errorf("%d small and %d large messages of 200", small, large)
	}
}
