use std::{
    hash::{BuildHasher, RandomState},
    io,
    net::Ipv4Addr,
    os::{
        fd::{AsFd, BorrowedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
};

/// First address of the range, 127.64.0.0.
const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 0]);

/// How many addresses there are in 127.64.0.0/10 whose last byte is neither 0 nor 255.
pub(super) const COUNT: u32 = (1 << 14) * PER_GROUP;

/// How many of 256 neighbours are used.
const PER_GROUP: u32 = 254;

/// How many addresses may be found taken before a search is given up. After the first few, more is only needed where most of
/// the range is taken.
const TRIES: u32 = 256;

/// How many addresses in a row are tried before a search goes on at another place: a program on this network can take
/// thousands in a row, but not many of millions.
const RUN: u32 = 16;

/// A loopback address that no other sandbox of this machine has, whichever process or user started it.
///
/// Meant for sandboxes that share the host's network, so that each can listen on any port of an address of its own. The
/// lease is an abstract socket named after the address. Such names, as loopback addresses, belong to the network namespace;
/// the kernel gives one to a single socket at a time, and frees it with the last process that holds the socket, however
/// that ends. No file is left behind and none is trusted.
///
/// Each process begins at a random place and goes on from there, or from another such place where it meets others, so that a
/// lease takes one try as a rule, and few whoever holds how many.
#[derive(Debug)]
pub struct Loopback {
    address: Ipv4Addr,
    lease: UnixDatagram,
}

impl Loopback {
    /// Leases an address until the value is dropped, and every copy of its descriptor closed.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrNotAvailable`] when all of 256 addresses here and there are taken; otherwise what the system says,
    /// as when this process may open no more files.
    pub fn lease() -> io::Result<Self> {
        static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| AtomicU32::new(anywhere()));
        Self::lease_from(&NEXT)
    }

    /// Leases the first address from a place on that is free, or one anywhere if that is far; moves the place behind it.
    pub(super) fn lease_from(next: &AtomicU32) -> io::Result<Self> {
        for try_idx in 0..TRIES {
            if try_idx > 0 && try_idx % RUN == 0 {
                next.store(anywhere(), Ordering::Relaxed);
            }
            let address = nth(next.fetch_add(1, Ordering::Relaxed) % COUNT);
            let name = SocketAddr::from_abstract_name(format!("prorl-loopback-{address}"))?;
            match UnixDatagram::bind_addr(&name) {
                Ok(lease) => return Ok(Self { address, lease }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
        let taken = "all of 256 loopback addresses here and there are taken (ss -xl shows by whom)";
        Err(io::Error::new(io::ErrorKind::AddrNotAvailable, taken))
    }

    /// Returns the address, one of 127.64.0.0/10.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }
}

/// What holds the lease. A process that inherits a copy of it holds the address too, even after the original is dropped.
impl AsFd for Loopback {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lease.as_fd()
    }
}

/// Returns a random index.
fn anywhere() -> u32 {
    // The only source of random numbers in the standard library; each state is another one.
    let [a, b, c, d, ..] = RandomState::new().hash_one(std::process::id()).to_le_bytes();
    u32::from_le_bytes([a, b, c, d]) % COUNT
}

/// Returns the address of this index: no one ends in 0 or 255, which some programs take for a network or for all of one.
fn nth(idx: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FIRST + idx / PER_GROUP * 256 + idx % PER_GROUP + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_fill_the_range_and_nothing_else() {
        assert_eq!(nth(0), Ipv4Addr::new(127, 64, 0, 1));
        assert_eq!(nth(253), Ipv4Addr::new(127, 64, 0, 254));
        assert_eq!(nth(254), Ipv4Addr::new(127, 64, 1, 1));
        assert_eq!(nth(COUNT - 1), Ipv4Addr::new(127, 127, 255, 254));
    }

    #[test]
    fn a_taken_address_is_passed_over_and_a_freed_one_comes_back() {
        // A part of the range that nothing else here is likely to have met.
        let at = RandomState::new().hash_one(0).to_le_bytes();
        let first = u32::from_le_bytes([at[0], at[1], at[2], 0]) % (COUNT - 300);
        let next = || AtomicU32::new(first);
        let one = Loopback::lease_from(&next()).unwrap();
        let two = Loopback::lease_from(&next()).unwrap();
        assert!(two.address() > one.address(), "{one:?} {two:?}");
        let (address, copy) = (one.address(), one.as_fd().try_clone_to_owned().unwrap());
        drop(one);
        let three = Loopback::lease_from(&next()).unwrap();
        assert!(three.address() > two.address(), "{copy:?} still holds {address}: {three:?}");
        drop(copy);
        assert_eq!(Loopback::lease_from(&next()).unwrap().address(), address);
    }

    #[test]
    fn a_thousand_taken_in_a_row_cost_a_few_tries() {
        let next = AtomicU32::new(anywhere());
        let first = next.load(Ordering::Relaxed);
        let held: Vec<_> = (0..1000).map(|_| Loopback::lease_from(&next).unwrap()).collect();
        let again = AtomicU32::new(first);
        Loopback::lease_from(&again).unwrap();
        let (tried, row) = (again.load(Ordering::Relaxed).wrapping_sub(first), 0..=1100);
        assert!(!row.contains(&tried), "it went along the row: {tried} of {}", held.len());
    }

    #[test]
    fn the_end_of_the_range_leads_to_its_beginning() {
        let next = AtomicU32::new(COUNT - 1);
        let leases = [Loopback::lease_from(&next).unwrap(), Loopback::lease_from(&next).unwrap()];
        assert!(leases[1].address() < leases[0].address(), "{leases:?}");
    }
}
