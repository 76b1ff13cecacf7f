"""Which endpoint gets the next request, and when?"""
