//! A connection's byte stream, which HTTP reads and writes while somebody watches for the peer's end.

use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use nix::sys::socket::{Shutdown, shutdown};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf, Ready},
    net::{TcpStream, UnixStream},
    time::{Duration, sleep},
};

/// The rest between two looks at a peer that has sent bytes which nobody reads yet.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// An accepted connection. Clones are one stream.
///
/// A client's leaving must be seen while its request is being worked on. Hyper sees it only by reading, and does not read
/// while bytes wait that belong to no request yet (a line break after the body, or the next request of a client that
/// pipelines). So the stream is shared, and [`hung_up`](Self::hung_up) asks the system instead.
#[derive(Clone)]
pub(crate) struct Stream(Arc<Socket>);

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls the method of the same name on whichever socket it is.
macro_rules! either {
    ($stream:expr, $method:ident($($argument:expr),*)) => {
        match &*$stream.0 {
            Socket::Tcp(socket) => socket.$method($($argument),*),
            Socket::Unix(socket) => socket.$method($($argument),*),
        }
    };
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Self {
        Self(Arc::new(Socket::Tcp(socket)))
    }
}

impl From<UnixStream> for Stream {
    fn from(socket: UnixStream) -> Self {
        Self(Arc::new(Socket::Unix(socket)))
    }
}

impl Stream {
    /// Waits until the peer will send nothing more, whether or not what it sent has been read.
    pub(crate) async fn hung_up(&self) {
        while self.is_open().await {
            sleep(LOOK_AGAIN).await;
        }
    }

    /// Waits until there is something to see, and tells whether it is something else than the end.
    async fn is_open(&self) -> bool {
        let seen: io::Result<Ready> = match &*self.0 {
            Socket::Tcp(socket) => socket.ready(Interest::READABLE).await,
            Socket::Unix(socket) => socket.ready(Interest::READABLE).await,
        };
        seen.is_ok_and(|ready| !ready.is_read_closed())
    }

    fn poll_write_with(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&Self) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(either!(self, poll_write_ready(cx)))?;
            match write(self) {
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        either!(self, as_fd())
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(either!(self, poll_read_ready(cx)))?;
            match either!(self, try_read(buf.initialize_unfilled())) {
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|n_bytes| buf.advance(n_bytes))),
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| either!(stream, try_write(bytes)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |stream| either!(stream, try_write_vectored(pieces)))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(())) // Nothing is kept back here.
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(shutdown(self.as_fd().as_raw_fd(), Shutdown::Write).map_err(io::Error::from))
    }
}
