"""Files of a compile that survive a crash: journal, work folder, lock, durable writes."""
