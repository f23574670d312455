//! Lines of a stream, of a bounded length.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Lines of a stream, none longer than `max`.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    from: R,
    held: Vec<u8>,
    /// Up to here `held` has no line end.
    searched: usize,
    max: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(from: R, max: usize) -> Lines<R> {
        Lines { from, held: Vec::new(), searched: 0, max }
    }

    /// The next line without its end; `None` at the end of the stream.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: what was read is kept for the next call.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.held[self.searched..].iter().position(|b| *b == b'\n') {
                let rest = self.held.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                self.searched = 0;
                line.pop();
                return Ok(Some(line));
            }
            self.searched = self.held.len();
            if self.held.len() > self.max {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the line is too long"));
            }
            self.held.reserve(16 << 10);
            if self.from.read_buf(&mut self.held).await? == 0 {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_is_given_up_at_its_cap() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut lines = Lines::new(tokio::io::repeat(b'x'), 1 << 20);
            assert_eq!(lines.next().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
            assert!(lines.held.capacity() <= 4 << 20, "{}", lines.held.capacity());
            let mut lines = Lines::new(&b"a\n\nbc\nd"[..], 9);
            let mut all = Vec::new();
            while let Some(line) = lines.next().await.unwrap() {
                all.push(line);
            }
            assert_eq!(all, [b"a".to_vec(), b"".to_vec(), b"bc".to_vec()]);
        });
    }
}
