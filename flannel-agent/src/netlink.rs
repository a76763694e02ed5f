//! The kernel's links, addresses, routes and neighbours, over rtnetlink. Its types stay in here.

pub mod address;
pub mod inventory;
pub mod link;
pub mod mirror;
pub mod neighbour;
pub mod route;
pub mod socket;
