"""The VM on a GPU: programs as PTX, the driver, and a stand-in for the driver."""
