"""Does attention as a hypernetwork generalize to new combinations of known rules?"""
