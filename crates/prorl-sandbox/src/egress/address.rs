//! Which addresses are the internet's, and which are this machine's or its surroundings'.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use nix::ifaddrs::getifaddrs;

use super::host;

/// What is wrong with an address, and so who may lift it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: anybody's.
    Public,
    /// Of a network that is private to its owner. An operator may name a host in it.
    Private(&'static str),
    /// The machine's own. An operator may name the very address.
    Local(&'static str),
    /// One that nobody is to reach, or that means no single machine.
    Never(&'static str),
}

const METADATA: Kind = Kind::Never(host::METADATA);
/// Of the link alone, where clouds keep more than their metadata.
const LINK_LOCAL: Kind = Kind::Never("a link-local address");
const RESERVED: Kind = Kind::Never("a reserved address");

/// Returns what an address is, as its number tells.
pub(super) fn kind(address: IpAddr) -> Kind {
    match address {
        IpAddr::V4(address) => kind_v4(address),
        IpAddr::V6(address) => kind_v6(address),
    }
}

fn kind_v4(address: Ipv4Addr) -> Kind {
    match address.octets() {
        // Those of the clouds, which give out the credentials of whichever machine asks.
        [169, 254, 169, 254] | [169, 254, 170, 2] | [100, 100, 100, 200] | [168, 63, 129, 16] | [192, 0, 0, 192] => {
            METADATA
        }
        [0, ..] => Kind::Never("an unspecified address"),
        [127, ..] => Kind::Local("a loopback address"),
        [10, ..] | [192, 168, ..] | [172, 16..=31, ..] => Kind::Private("a private address"),
        [100, 64..=127, ..] => Kind::Private("a provider's private address"),
        [198, 18..=19, ..] => Kind::Private("an address of a test network"),
        [169, 254, ..] => LINK_LOCAL,
        [224..=239, ..] => Kind::Never("a multicast address"),
        [255, 255, 255, 255] => Kind::Never("the broadcast address"),
        [192, 0, 0, _] | [192, 88, 99, _] | [240..=255, ..] => RESERVED,
        _ => Kind::Public,
    }
}

fn kind_v6(address: Ipv6Addr) -> Kind {
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Kind::Never("an unspecified address"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Kind::Local("a loopback address"),
        // A translator of the local network's own.
        [0x64, 0xff9b, 1, ..] => Kind::Private("a private translator's address"),
        [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254] => METADATA,
        [0xfc00..=0xfdff, ..] => Kind::Private("a private address"),
        [0xfe80..=0xfebf, ..] => LINK_LOCAL,
        [0xfec0..=0xfeff, ..] => Kind::Private("a site-local address"),
        [0xff00..=0xffff, ..] => Kind::Never("a multicast address"),
        // Both machines of a Teredo tunnel.
        [0x2001, 0, high, low, _, _, masked_high, masked_low] => match kind_v4(v4(high, low)) {
            Kind::Public => kind_v4(v4(!masked_high, !masked_low)),
            wrong => wrong,
        },
        // An address of IPv4 in one of IPv6: as sockets have it or once had it, for translators (the next two), by 6to4, and by
        // a tunnel within a site, which any prefix can have.
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low]
        | [0, 0, 0, 0, 0xffff, 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..]
        | [.., 0 | 0x200, 0x5efe, high, low] => kind_v4(v4(high, low)),
        // What is given out begins with 001.
        [0x2000..=0x3fff, ..] => Kind::Public,
        _ => RESERVED,
    }
}

fn v4(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))
}

/// The addresses of this machine's interfaces, as they are now.
#[derive(Debug)]
pub(super) struct Own(Vec<IpAddr>);

impl Own {
    /// # Errors
    /// When the kernel does not say.
    pub(super) fn read() -> io::Result<Self> {
        let addresses = getifaddrs()?.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        });
        Ok(Self(addresses.collect()))
    }

    /// Returns what an address is, as its number tells and this machine's interfaces.
    pub(super) fn kind(&self, address: IpAddr) -> Kind {
        match kind(address) {
            Kind::Public | Kind::Private(_) if self.reaches(address) => Kind::Local("this machine's own address"),
            kind => kind,
        }
    }

    /// Tells whether an address is one of these, or means one of them by a tunnel or a translator.
    fn reaches(&self, address: IpAddr) -> bool {
        let is_own = |address: IpAddr| self.0.contains(&address);
        match address.to_canonical() {
            IpAddr::V6(v6) => is_own(v6.into()) || embedded(v6).into_iter().any(|v4| is_own(v4.into())),
            v4 @ IpAddr::V4(_) => is_own(v4),
        }
    }
}

/// Returns the addresses of IPv4 that one of IPv6 may stand for.
fn embedded(address: Ipv6Addr) -> Vec<Ipv4Addr> {
    match address.segments() {
        [0x2001, 0, high, low, _, _, masked_high, masked_low] => vec![v4(high, low), v4(!masked_high, !masked_low)],
        [0x2002, high, low, ..] | [.., high, low] => vec![v4(high, low)],
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_public(address: &str) -> bool {
        kind(address.parse().unwrap()) == Kind::Public
    }

    #[test]
    fn the_internet_is_public() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.1.1",
            "192.169.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "169.253.1.1",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "126.255.255.255",
            "128.0.0.0",
            "192.0.2.1",
            "198.51.100.1",
            "203.0.113.1",
            "192.0.1.0",
            "2606:4700::1111",
            "2001:db8::1",
            "64:ff9b::8.8.8.8",
            "2002:808:808::1",
            "::ffff:8.8.8.8",
            "2001:4860:4860::8888",
            "2a00::5efe:808:808",
        ] {
            assert!(is_public(address), "{address}: {:?}", kind(address.parse().unwrap()));
        }
    }

    #[test]
    fn what_is_not_the_internets_is_refused() {
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.127.255.255",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.0.1",
            "169.254.169.254",
            "169.254.170.2",
            "168.63.129.16",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.0.192",
            "192.168.0.1",
            "192.88.99.1",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::2",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:0:127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::8.8.8.8",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::1",
            "2001:0:a00:1::f7f7:f7f7",
            "2001:0:808:808::80ff:fffe",
            "fc00::1",
            "fdff::1",
            "fd00:ec2::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "feff::1",
            "ff02::1",
            "100::1",
            "4000::1",
            "2a00::5efe:7f00:1",
            "2a00::200:5efe:a00:1",
            "1::1",
        ] {
            assert!(!is_public(address), "{address}");
        }
        assert_eq!(kind("fd00:ec2::254".parse().unwrap()), METADATA);
    }

    proptest! {
        #[test]
        fn an_address_is_the_same_however_it_is_wrapped(bits: u32) {
            let v4 = Ipv4Addr::from_bits(bits);
            let [high, low] = [(bits >> 16) as u16, (bits & 0xffff) as u16];
            for v6 in [
                v4.to_ipv6_mapped(),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 1, 2, 3, 4, 5),
                Ipv6Addr::new(0x2001, 0, 0x808, 0x808, 0, 0, !high, !low),
                Ipv6Addr::new(0x2001, 0, high, low, 0, 0, !0x808, !0x808),
                Ipv6Addr::new(0x2a00, 1, 2, 3, 0x200, 0x5efe, high, low),
            ] {
                prop_assert_eq!(kind(v6.into()), kind(v4.into()), "{}", v6);
            }
            if v4.is_loopback() || v4.is_private() || v4.is_link_local() || v4.is_multicast() || v4.is_unspecified() {
                prop_assert_ne!(kind(v4.into()), Kind::Public);
            }
        }

        #[test]
        fn ones_own_address_is_found_in_every_wrapping(bits: u32) {
            let v4 = Ipv4Addr::from_bits(bits);
            let own = Own(vec![v4.into()]);
            let [high, low] = [(bits >> 16) as u16, (bits & 0xffff) as u16];
            for address in [IpAddr::V4(v4), v4.to_ipv6_mapped().into(), Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1).into()] {
                prop_assert_ne!(own.kind(address), Kind::Public);
            }
        }
    }

    #[test]
    fn this_machine_has_a_loopback_address() {
        assert!(Own::read().unwrap().0.contains(&Ipv4Addr::LOCALHOST.into()));
    }
}
