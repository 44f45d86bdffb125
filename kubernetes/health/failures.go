package health

import "github.com/sirupsen/logrus"

// Failures logs the failures of a task that repeats. Failures is not safe for concurrent use.
type Failures struct {
	Log *logrus.Logger
	// Message is the message of a failure.
	Message string
	last    string
}

// Note logs err unless the previous result of the task had the same text. A nil err is a success.
func (f *Failures) Note(err error) {
	if err == nil {
		f.last = ""
		return
	}
	if text := err.Error(); text != f.last {
		f.Log.WithError(err).Warn(f.Message)
		f.last = text
	}
}
