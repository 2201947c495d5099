//! When something last passed on a connection.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, sleep_until},
};

/// When something last passed on one connection.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    begun: Instant,
    /// Milliseconds from then to when something last passed.
    last: Arc<AtomicU64>,
    /// Whether a request is waited for that has limits of its own.
    is_at_work: Arc<AtomicBool>,
}

impl Traffic {
    pub(super) fn begin() -> Self {
        Self { begun: Instant::now(), last: Arc::default(), is_at_work: Arc::default() }
    }

    /// Waits until nothing has passed for this long. The time in which a request is [at work](Self::work) does not count.
    pub(super) async fn ceases(&self, limit: Duration) {
        loop {
            let due = self.begun + Duration::from_millis(self.last.load(Ordering::Relaxed)) + limit;
            let now = Instant::now();
            if now < due {
                sleep_until(due).await;
            } else if self.is_at_work.load(Ordering::Relaxed) {
                // It ends later than now, and so silence does not begin before this is over.
                sleep_until(now + limit).await;
            } else {
                return;
            }
        }
    }

    /// Notes that a request is waited for, until what this returns is dropped.
    pub(super) fn work(&self) -> Work<'_> {
        self.is_at_work.store(true, Ordering::Relaxed);
        Work(self)
    }

    fn note(&self) {
        let passed = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(passed, Ordering::Relaxed);
    }

    fn count(&self, n_bytes: usize) {
        if n_bytes > 0 {
            self.note();
        }
    }
}

/// That a request is waited for.
pub(super) struct Work<'a>(&'a Traffic);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.0.note();
        self.0.is_at_work.store(false, Ordering::Relaxed);
    }
}

/// The sandbox's side of a connection. Whatever passes, passes here, and is noted.
pub(super) struct Noted {
    pub(super) stream: TcpStream,
    pub(super) traffic: Traffic,
}

impl AsyncRead for Noted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        self.traffic.count(into.filled().len() - before);
        read
    }
}

impl AsyncWrite for Noted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(n_bytes)) = &written {
            self.traffic.count(*n_bytes);
        }
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        if let Poll::Ready(Ok(n_bytes)) = &written {
            self.traffic.count(*n_bytes);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_lasts_exactly_as_long_as_is_said() {
        const LIMIT: Duration = Duration::from_mins(5);
        let traffic = Traffic::begin();
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs(1)).await;
        traffic.count(1);
        tokio::time::sleep(Duration::from_secs(2)).await;
        // The end of a stream is no traffic.
        traffic.count(0);
        traffic.ceases(LIMIT).await;
        assert_eq!(begun.elapsed().as_secs(), 301);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_an_answer_is_no_silence() {
        const LIMIT: Duration = Duration::from_mins(5);
        let traffic = Traffic::begin();
        let begun = Instant::now();
        let waits = async {
            let _work = traffic.work();
            tokio::time::sleep(LIMIT * 2 + Duration::from_secs(7)).await;
        };
        tokio::join!(waits, traffic.ceases(LIMIT));
        assert_eq!(begun.elapsed().as_secs(), 907);
    }
}
