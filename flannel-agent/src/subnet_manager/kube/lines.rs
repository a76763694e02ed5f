//! The lines of a watch, one event each.

/// No event is larger: etcd takes objects of 1.5 MiB.
const LARGEST_EVENT: usize = 16 << 20;

/// Cuts a stream into lines, whatever the pieces it comes in.
#[derive(Default)]
pub(super) struct Lines {
    buffer: Vec<u8>,
    /// What of the buffer has been given out.
    done: usize,
    /// Up to where there is no end of a line behind `done`.
    searched: usize,
}

impl Lines {
    /// Takes a piece in.
    ///
    /// # Errors
    /// A line without an end.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        self.buffer.drain(..self.done);
        self.searched -= self.done;
        self.done = 0;
        if self.buffer.len() + bytes.len() > LARGEST_EVENT {
            return Err("an event without an end");
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// The next line that is whole and not blank.
    pub(super) fn next(&mut self) -> Option<&[u8]> {
        loop {
            let rest = self.buffer.get(self.searched..)?;
            let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
                self.searched = self.buffer.len();
                return None;
            };
            let (start, end) = (self.done, self.searched + end);
            self.done = end + 1;
            self.searched = end + 1;
            if !self.buffer.get(start..end)?.trim_ascii().is_empty() {
                return self.buffer.get(start..end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_from_any_pieces() {
        let text = b"{\"a\":1}\n\n  \n{\"b\":2}\n{\"c\"";
        for size in 1..text.len() {
            let (mut lines, mut got) = (Lines::default(), Vec::new());
            for piece in text.chunks(size) {
                lines.add(piece).expect("short");
                while let Some(line) = lines.next() {
                    got.push(line.to_vec());
                }
            }
            assert_eq!(got, [b"{\"a\":1}", b"{\"b\":2}"], "in pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_an_end_is_given_up() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; LARGEST_EVENT / 2];
        assert!(lines.add(&piece).is_ok() && lines.next().is_none());
        assert!(lines.add(&piece).is_ok() && lines.next().is_none());
        assert!(lines.add(b"x").is_err());
    }
}
