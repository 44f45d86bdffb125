package device

import "time"

// AllowMeasuring sets how long MeasureWrites may take.
func AllowMeasuring(limit time.Duration) { measureLimit = limit }
