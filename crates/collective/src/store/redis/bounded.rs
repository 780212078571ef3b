//! Bounds the answers of a Redis server before the client library parses them, because its parser accepts any length that a server
//! claims.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{super::VALUE_BYTES_MAX, KEYS_MAX};

/// The longest line, such as an error.
const LINE_BYTES_MAX: usize = 4 << 10;

/// A connection that fails when an answer exceeds the largest one that the store requests: a line, a value, or the values of one
/// `MGET`.
#[pin_project]
#[derive(Debug)]
pub(super) struct Bounded<S> {
    #[pin]
    stream: S,
    answers: Answers,
}

impl<S> Bounded<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, answers: Answers::default() }
    }
}

impl<S: AsyncRead> AsyncRead for Bounded<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (this, before) = (self.project(), buffer.filled().len());
        ready!(this.stream.poll_read(context, buffer))?;
        let checked = this.answers.check(&buffer.filled()[before..]);
        Poll::Ready(checked.map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why)))
    }
}

impl<S: AsyncWrite> AsyncWrite for Bounded<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.project().stream.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().stream.poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().stream.poll_shutdown(context)
    }
}

/// The part of an answer to which the next byte belongs.
#[derive(Debug, Default)]
struct Answers {
    /// The bytes of a value, and of its line's end, that are still to come.
    value: usize,
    /// The begun line.
    line: Vec<u8>,
    /// The elements of an array that are still to come.
    elements: usize,
}

impl Answers {
    /// # Errors
    /// Which bound the answer exceeds.
    fn check(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        while !bytes.is_empty() {
            let value = self.value.min(bytes.len());
            self.value -= value;
            bytes = &bytes[value..];
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let (line, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
            if self.line.len() + line.len() > LINE_BYTES_MAX {
                return Err("it sent a line longer than any answer has: check that it is a Redis server");
            }
            self.line.extend_from_slice(line);
            bytes = rest;
            if end.is_some() {
                self.end_line()?;
                self.line.clear();
            }
        }
        Ok(())
    }

    fn end_line(&mut self) -> Result<(), &'static str> {
        let count = || std::str::from_utf8(&self.line[1..]).ok()?.trim().parse::<i64>().ok();
        match self.line[0] {
            b'+' | b'-' | b':' => {}
            // -1 means that there is no value.
            b'$' => match count().ok_or("it sent a length that is no number")? {
                length @ 0.. if length <= VALUE_BYTES_MAX as i64 => self.value = length as usize + 2,
                0.. => return Err("it sent a value longer than values are: use another key or database"),
                _ => {}
            },
            b'*' if self.elements == 0 => match count()
                .ok_or("it sent a number of values that is no number")?
            {
                count @ 0.. if count <= KEYS_MAX as i64 => {
                    self.elements = count as usize;
                    return Ok(());
                }
                _ => return Err("it sent more values than were asked for: check that it is a Redis server"),
            },
            _ => return Err("it sent what is no answer of Redis: check that it is a Redis server"),
        }
        self.elements = self.elements.saturating_sub(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(answers: &[u8], part: usize) -> Result<(), &'static str> {
        let mut state = Answers::default();
        answers.chunks(part).try_for_each(|part| state.check(part))
    }

    #[test]
    fn s5_answers_pass_however_they_are_cut() {
        let longest = VALUE_BYTES_MAX;
        let large = [format!("${longest}\r\n").into_bytes(), vec![b'\n'; longest], b"\r\n".to_vec()].concat();
        let many = [b"*128\r\n".to_vec(), b"$1\r\n*\r\n".repeat(127), large.clone()].concat();
        let answers = [
            &b"+OK\r\n-ERR no\r\n:12\r\n$-1\r\n$0\r\n\r\n$3\r\n\r\n*\r\n*0\r\n"[..],
            &many,
            &large,
            &many,
            b"+OK\r\n",
        ];
        for part in [1, 2, 3, 4096, usize::MAX] {
            assert_eq!(check(&answers.concat(), part), Ok(()), "{part}");
        }
    }

    #[test]
    fn s5_what_no_answer_is_fails_at_its_bound() {
        let line = [b"+".to_vec(), vec![b'x'; LINE_BYTES_MAX]].concat();
        let length = format!("${}\r\n", VALUE_BYTES_MAX + 1);
        let refused: [&[u8]; 10] = [
            &line,
            length.as_bytes(),
            b"$9223372036854775808\r\n",
            b"$\r\n",
            b"*129\r\n",
            b"*-1\r\n",
            b"*1\r\n*1\r\n",
            b"%1\r\n",
            b">1\r\n",
            b"\n",
        ];
        for answer in refused {
            assert!([1, usize::MAX].iter().all(|part| check(answer, *part).is_err()), "{answer:?}");
        }
    }
}
